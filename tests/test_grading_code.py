"""Grading programs: the right verdict and the right reason, for honest programs and for those that cheat."""

import ast
import gzip
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from evals.grading import sandbox
from evals.grading.code import REASONS, extract_program, grade_program
from evals.grading.code_compare import same_text, same_value
from evals.grading.sandbox import Limits

SHARED = Path(__file__).parents[1] / ".." / "shared"

pytestmark = pytest.mark.skipif(sandbox.available_rung() is None, reason="no sandbox here")


def script(program, stdin, stdout, **options):
    return grade_program(program, [{"input": stdin, "output": stdout}], **options)


def function(program, name, *cases, **options):
    """Grade with cases `(arguments..., expected)` given as Python values."""
    tests = [{"input": "\n".join(map(json.dumps, case[:-1])), "output": json.dumps(case[-1])} for case in cases]
    return grade_program(program, tests, fn_name=name, **options)


# --- verdicts and reasons --------------------------------------------------------------------------------------------


def test_one_of_each_reason():
    assert script("print(int(input()) * 2)", "21\n", "42\n").reason == "passed"
    assert script("print(41)", "", "42").reason == "wrong_answer"
    assert script("print(42)\n1 / 0", "", "42").reason == "runtime_error"
    assert script("while True: pass", "", "42", time_limit_s=1).reason == "timeout"
    assert script("while True: print(42)", "", "42", limits=Limits(output_bytes=10_000)).reason == "output_limit"
    assert script("def broken(:", "z" * 200_000, "42").reason == "compile_error"
    assert grade_program("print(42)", []).reason == "no_tests"
    assert grade_program("def f(): return 1", [], fn_name="f").reason == "no_tests"
    assert grade_program(None, [{"input": "", "output": ""}]).reason == "compile_error"


def test_results_up_to_the_first_failure():
    tests = [{"input": str(n), "output": str(n)} for n in (1, 2, 3, 4)]
    verdict = grade_program("n = int(input()); print(n if n < 3 else 0)", tests)
    assert not verdict.correct and verdict.reason == "wrong_answer"
    assert [result.reason for result in verdict.per_test] == ["passed", "passed", "wrong_answer"]
    assert all(0 < result.seconds < 5 for result in verdict.per_test)
    verdict = grade_program("def f(n): return n if n < 3 else 1 // 0", tests, fn_name="f")
    assert [result.reason for result in verdict.per_test] == ["passed", "passed", "runtime_error"]


@pytest.mark.parametrize(
    "program", ["def broken(:", "x = (", "return 1", "\0", "print('a'\n  b", "é = \udc80", "(" * 5000 + ")" * 5000]
)
def test_what_does_not_compile(program):
    assert script(program, "", "1").reason == "compile_error"
    assert function(program, "f", (1, 1)).reason == "compile_error"


def test_bad_settings_are_errors_of_the_caller():
    with pytest.raises(ValueError, match="unknown mode 'lenient'"):
        script("", "", "", mode="lenient")
    with pytest.raises(ValueError, match="unknown sandbox rung"):
        script("", "", "", rung="docker")
    with pytest.raises(ValueError, match="test 0 of a function is not JSON"):
        grade_program("def f(x): return x", [{"input": "[1,", "output": "1"}], fn_name="f")
    assert script("print(1)", "", "1", rung="none").correct


# --- scripts ---------------------------------------------------------------------------------------------------------


def test_scripts_with_the_usual_fast_input_and_output():
    stdin = "3\n1 2 3\n4 5\n"
    for program in (
        "import sys\nrd = sys.stdin.buffer.readline\nn = int(rd())\n"
        "print(sum(map(int, rd().split())), rd().decode().strip())",
        "import sys\ndata = sys.stdin.read().split()\nprint(sum(map(int, data[1:4])), *data[4:])",
        "input(); print(sum(map(int, input().split())), input())",
        "import os\nd = os.read(0, 99).split()\nos.write(1, b'%d ' % sum(map(int, d[1:4])) + b' '.join(d[4:]))",
        "d = open(0).read().split()\nprint(sum(map(int, d[1:4])), *d[4:])",
        "import sys, io\ninput = io.BytesIO(sys.stdin.buffer.read()).readline\nn = int(input())\n"
        "sys.stdout.write(f'{sum(map(int, input().split()))} {input().decode().strip()}')",
        "import fileinput\nd = list(fileinput.input())\nprint(sum(map(int, d[1].split())), d[2].strip())",
        "import sys\nnext(sys.stdin)\nfor line, f in zip(sys.stdin, (lambda x: sum(map(int, x.split())), str.strip)):"
        " print(f(line), end=' ')",
    ):
        assert script(program, stdin, "6 4 5\n").correct, program


def test_threads_exit_handlers_and_exits_do_not_lose_output():
    assert script("import threading\nthreading.Thread(target=lambda: print(5)).start()", "", "5").correct
    assert script("import atexit\natexit.register(print, 5)", "", "5").correct
    assert script("print(5)\nexit()", "", "5").correct
    assert script("import sys\nprint(5); sys.exit(0)", "", "5").correct
    assert script("import os\nprint(5, flush=True); os._exit(0)", "", "5").correct
    assert script("def main():\n    print(5)\nif __name__ == '__main__':\n    main()", "", "5").correct


def test_only_a_clean_exit_passes_strictly():
    program = "import sys\nprint(5)\nsys.exit(1)"
    assert script(program, "", "5").reason == "runtime_error"
    assert script(program, "", "5", mode="official").correct


def test_deep_recursion_and_huge_integers():
    assert script("def f(n): return n and 1 + f(n - 1)\nprint(f(30000))", "", "30000").correct
    assert script("def f(n): return f(n + 1)\nf(0)", "", "1").reason == "runtime_error"
    digits = "1" + "0" * 20_000
    assert script("print(10 ** 20000)", "", digits).correct
    assert script("print(int(input()) + 1)", digits, digits[:-1] + "1").correct
    assert function("def f(n): return n + 1", "f", (1, 2)).correct
    tests = [{"input": digits, "output": digits[:-1] + "1"}]
    assert grade_program("def f(n): return n + 1", tests, fn_name="f").correct
    assert not grade_program("def f(n): return n", tests, fn_name="f").correct


def test_long_outputs_arrive_whole():
    assert script("print('x' * 400_000)", "", "x" * 400_000).correct
    assert function("def f(n): return list(range(n))", "f", (100_000, list(range(100_000)))).correct


def test_a_time_limit_is_cpu_time_so_that_a_busy_machine_changes_nothing():
    program = "s = 0\nfor i in range(1_500_000):\n    s += i\nprint(s)"
    burners = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(6)]
    try:
        assert script(program, "", str(sum(range(1_500_000))), time_limit_s=1).correct
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


# --- functions -------------------------------------------------------------------------------------------------------


def test_methods_and_plain_functions():
    method = "class Solution:\n    def add(self, a, b):\n        return a + b"
    assert function(method, "add", (1, 2, 3), ([1], [2], [1, 2])).correct
    assert function("def add(a, b): return a + b", "add", (1, 2, 3), ("a", "b", "ab")).correct
    assert function("add = lambda a, b: a + b", "add", (1, 2, 3)).correct
    helper = "class Solution: pass\ndef add(a, b): return a + b"
    assert function(helper, "add", (1, 2, 3)).correct
    assert function(method, "sub", (1, 2, 3)).reason == "runtime_error"
    assert function("def f(): return 7", "f", (7,)).correct
    assert function("def f(x): return x", "f", (None, None), (True, True), ({"a": [1]}, {"a": [1]})).correct
    assert not function(method, "add", (1, 2, 4)).correct


def test_a_fresh_solution_per_test_and_no_main():
    program = (
        "class Solution:\n    def __init__(self): self.seen = []\n"
        "    def f(self, x): self.seen.append(x); return len(self.seen)\n"
        "if __name__ == '__main__': raise SystemExit(1)"
    )
    assert function(program, "f", (5, 1), (6, 1)).correct


def test_functions_may_print_and_their_prints_count_for_nothing():
    assert function("def f(x):\n    print('y' * 10_000_000)\n    return x", "f", (1, 1)).correct
    assert not function("def f(x):\n    print(9)", "f", (3, 9)).correct


def test_names_that_leetcode_solutions_assume():
    program = (
        "class Solution:\n    def f(self, a: List[int]) -> Optional[int]:\n"
        "        heapify(a); c = Counter(a); d = deque(sorted(a)); m = defaultdict(int)\n"
        "        return [len(ascii_lowercase), bisect_left(d, 2), gcd(4, 6), pow(2, 5, 7), inf > 1,"
        " c.most_common(1)[0][1], reduce(lambda x, y: x + y, accumulate(a)), max(d), math.comb(4, 2),"
        " cache is not None, m[0]]"
    )
    expected = [26, 1, 2, 4, True, 1, 11, 3, 6, True, 0]
    assert function(program, "f", ([3, 1, 2], expected), packages=True).correct
    assert function(program, "f", ([3, 1, 2], expected)).reason == "runtime_error"
    assert function(program, "f", ([3, 1, 2], expected), mode="official").correct


def test_packages_and_their_numbers():
    program = (
        "import numpy as np\ndef f(a): return [np.int64(sum(a)), np.array(a) * 2, np.float64(0.5), np.bool_(True)]"
    )
    assert function(program, "f", ([1, 2], [3, [2, 4], 0.5, True]), packages=True).correct
    assert function(program, "f", ([1, 2], [3, [2, 4], 0.5, True])).reason == "runtime_error"
    sorted_list = "from sortedcontainers import SortedList\nprint(*SortedList(map(int, input().split())))"
    assert script(sorted_list, "3 1 2", "1 2 3").reason == "runtime_error"


def test_tests_of_a_function_have_their_time_each():
    program = "def f(n):\n    s = 0\n    for i in range(n): s += i\n    return s"
    n = 3_000_000
    cases = [(n, n * (n - 1) // 2)] * 4  # together more than a second
    assert function(program, "f", *cases, time_limit_s=1).correct
    started = time.monotonic()
    verdict = function("def f(n):\n    while n: pass\n    return n", "f", (0, 0), (1, 1), (0, 0), time_limit_s=1)
    assert [result.reason for result in verdict.per_test] == ["passed", "timeout"]
    assert time.monotonic() - started < 60


# --- cheats ----------------------------------------------------------------------------------------------------------

LIAR = "class Liar:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"

FUNCTION_CHEATS = {
    "equal to all": LIAR + "def f(x): return Liar()",
    "equal to all, in a list": LIAR + "def f(x): return [Liar()]",
    "a number that lies": "class N(int):\n    def __eq__(s, o): return True\n    def __repr__(s): return '9'\n"
    "def f(x): return N(1)",
    "a float that lies": "class N(float):\n    def __eq__(s, o): return True\n    def __repr__(s): return '9'\n"
    "def f(x): return N(1)",
    "a string that lies": "class S(str):\n    def __eq__(s, o): return True\ndef f(x): return S('9')",
    "a list that lies": "class L(list):\n    def __eq__(s, o): return True\ndef f(x): return L()",
    "a tolerant number": "class N:\n    def __sub__(s, o): return s\n    def __abs__(s): return 0.0\n"
    "    def __le__(s, o): return True\n    def __float__(s): return 9.0\ndef f(x): return N()",
    "early exit": "import os\ndef f(x):\n    print('PASSED')\n    os._exit(0)",
    "early exit while loading": "import os\nos._exit(0)",
    "sys.exit": "import sys\ndef f(x): sys.exit(0)",
    "forged verdicts on every descriptor": "import os\nfor fd in range(20):\n"
    "    for text in ('passed', '{\"status\": \"passed\"}', '[true]', '{\"correct\": true}', '1'):\n"
    "        try: os.write(fd, (text + '\\n').encode())\n        except OSError: pass\n"
    "def f(x): return None",
    "forged replies": "import os\nfor _ in range(50): os.write(3, b'{\"status\": \"ok\"}\\n')\ndef f(x): return None",
    "replies that are no replies": "import os\nos.write(3, b'[' * 100000 + b'\\n')\ndef f(x): return 1",
    "frames": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):\n"
    "            if isinstance(value, dict) and 'output' in value: return value['output']\n"
    "            if value == 9: return value\n"
    "        frame = frame.f_back",
    "objects of the collector": "import gc\ndef f(x):\n    for thing in gc.get_objects():\n"
    "        if isinstance(thing, dict) and {'output', 'expected'} & set(map(str, thing)): return 9",
    "patched builtins": "import builtins, json, sys\nbuiltins.all = lambda *a: True\nbuiltins.len = lambda *a: 1\n"
    "json.loads = lambda *a, **k: 9\njson.dumps = lambda *a, **k: '{\"status\": \"ok\", \"correct\": true}'\n"
    "def f(x): return None",
    "patched harness": "import sys\nfor name, module in list(sys.modules.items()):\n    if name.startswith('jail'):\n"
    "        for key, value in list(vars(module).items()):\n"
    "            if callable(value): setattr(module, key, lambda *a, **k: True)\ndef f(x): return None",
    "closed descriptors": "import os\nos.closerange(0, 100)\ndef f(x): return 9",
    "own descriptors closed later": "import os\ndef f(x):\n    os.close(3)\n    return 9",
    "not a number": "def f(x): return float('nan')",
    "infinite": "def f(x): return float('inf')",
    "a circle": "def f(x):\n    a = []; a.append(a)\n    return a",
    "a generator": "def f(x): yield 9",
    "true for one": "def f(x): return True",
    "nested very deep": "def f(x):\n    a = 9\n    for _ in range(100000): a = [a]\n    return a",
    "itself": "def f(x): return f",
    "exception that is a result": "class E(BaseException): pass\ndef f(x): raise E(9)",
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTION_CHEATS)
@pytest.mark.parametrize("mode", ["strict", "official"])
def test_cheating_functions_fail(name, mode):
    # Officially `True` is 1; the answer to the second test is another number.
    verdict = function(FUNCTION_CHEATS[name], "f", (3, 9), (1, 1), mode=mode)
    assert not verdict.correct
    assert verdict.reason in ("wrong_answer", "runtime_error"), verdict
    assert function("def f(x): return x * x", "f", (3, 9), (1, 1), mode=mode).correct


def test_cheating_is_named_for_what_it_looks_like():
    assert function(FUNCTION_CHEATS["equal to all"], "f", (3, 9)).reason == "wrong_answer"
    assert function(FUNCTION_CHEATS["early exit"], "f", (3, 9)).reason == "runtime_error"
    flood = "import os\ndef f(x):\n    while True: os.write(3, b'x' * 10000)"
    assert function(flood, "f", (3, 9), limits=Limits(output_bytes=100_000)).reason == "output_limit"


SCRIPT_CHEATS = {
    "claims": "print('passed'); print('{\"status\": \"ok\", \"correct\": true}'); print('PASSED all tests')",
    "leaves at once": "import os; os._exit(0)",
    "claims by another door": "import os\nfor fd in range(3, 20):\n"
    "    try: os.write(fd, b'{\"status\": \"passed\"}\\n9\\n')\n"
    "    except OSError: pass",
    "looks around": "import os, glob\nfor path in glob.glob('/tmp/*') + glob.glob('../*') + glob.glob('/sandbox/*'):\n"
    "    try: print(open(path).read())\n    except OSError: pass",
    "reads on": "import sys\nprint(sys.stdin.read())",
    "patches": "import builtins, sys\nbuiltins.print = lambda *a: None\nbuiltins.open = None\nsys.stdout = None",
    "replaces standard output": "import os\nos.dup2(os.open('/dev/null', os.O_WRONLY), 1)\nprint(9)",
    "closes everything": "import os\nos.closerange(0, 300)",
    "nothing": "",
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPT_CHEATS)
def test_cheating_scripts_fail(name):
    verdict = script(SCRIPT_CHEATS[name], "3\n", "9\n")
    assert not verdict.correct
    assert verdict.reason in ("wrong_answer", "runtime_error")


# --- comparing outputs -----------------------------------------------------------------------------------------------

STRICT_TEXT = [
    ("1\n2\n", "1\n2", True),
    ("  1 \n2  \n\n", "1\n2", True),
    ("1 2", "1  2", True),
    ("1 2", "1\n2", False),
    ("1\n\n2", "1\n2", False),
    ("", "", True),
    ("\n", "", True),
    ("0.3333333333333333\n0.666667", "0.3333333333333\n0.66666666666", True),
    ("0.333334", "0.333333", True),
    ("0.33334", "0.33333", False),
    ("2000000.5", "2000000.0", True),
    ("2000003.0", "2000000.0", False),
    ("1e-3", "0.001", True),
    ("5.0", "5", True),
    ("5", "5.0", True),
    ("5.0000001", "5", False),
    ("10000001", "10000000", False),
    ("123456789012345678901", "123456789012345678900", False),
    ("nan", "0.0", False),
    ("inf", "1e400", False),
    ("1_0", "10", False),
    ("Yes", "YES", False),
    ("0x10", "16", False),
    ("[1, 2]", "[1,2]", False),
    ("1e99999999999999999999", "5", False),
    ("٣", "3", False),
    ("x 1.0000001", "x 1.0", True),
    ("y 1.0000001", "x 1.0", False),
]


@pytest.mark.parametrize("output, expected, same", STRICT_TEXT)
def test_text_strictly(output, expected, same):
    assert same_text(output, expected, "strict") is same


def test_comparing_hostile_output_is_linear():
    started = time.monotonic()
    for token in (
        "1" * 2_000_000 + "x",
        "1" * 2_000_000,
        "." * 2_000_000,
        "1." + "1" * 2_000_000 + "e",
        "1 " * 500_000,
    ):
        for expected in ("5", "0.5", "5 " * 500_000):
            for mode in ("strict", "official"):
                assert not same_text(token, expected, mode)
    assert time.monotonic() - started < 60


def test_text_officially():
    assert same_text("1.50 2", "1.5 2.0", "official")
    assert same_text(" a\nb ", "a\nb", "official")
    assert not same_text("0.3333333333333333", "0.3333333333333", "official")
    assert not same_text("a  b", "a b", "official")  # words are compared by line


STRICT_VALUES = [
    (1, 1, True), (1, 2, False), (1, 1.0, True), (1.0, 1, True), (1.0000001, 1, False), (1.0000001, 1.0, True),
    (0.3333333, 1 / 3, True), (True, 1, False), (1, True, False), (True, True, True), (None, None, True),
    (0, None, False), ("a", "a", True), ("1", 1, False), ([1, 2], [1, 2], True), ([2, 1], [1, 2], False),
    ([1], [1, 2], False), ([[1.0000001]], [[1.0]], True), ({"a": 1}, {"a": 1}, True), ({"a": 1}, {"b": 1}, False),
    ({"a": 1}, {"a": 1, "b": 2}, False), ([], {}, False), ("", [], False), (10 ** 400, 1.5, False),
    (2 ** 60 + 1, 2 ** 60, False),
]  # fmt: skip


@pytest.mark.parametrize("value, expected, same", STRICT_VALUES)
def test_values_strictly(value, expected, same):
    assert same_value(value, expected, "strict") is same


def test_values_officially():
    program = "def f(x): return (x, (x,))"
    assert function(program, "f", (1, [1, [1]])).correct
    assert not function(program, "f", (1, [1, [1]]), mode="official").correct
    assert function("def f(x): return (x, x)", "f", (1, [1, 1]), mode="official").correct
    assert function("def f(x): return True", "f", (1, 1), mode="official").correct
    assert not function("def f(x): return 0.1 + 0.2", "f", (1, 0.3), mode="official").correct
    assert function("def f(x): return 0.1 + 0.2", "f", (1, 0.3)).correct


# --- finding the program ---------------------------------------------------------------------------------------------

FENCE = "```"
COMPLETIONS = [
    ("```python\nprint(1)\n```", "print(1)\n"),
    ("```python\nprint(1)\n```\nExample output:\n```\n1\n```\n", "print(1)\n"),
    ("First try:\n```python\nprint(0)\n```\nBetter:\n```python\nprint(1)\n```", "print(1)\n"),
    ("```\nprint(1)\n```", "print(1)\n"),
    ("```\nn = int(input())\nprint(n)\n```\nFor 1 it prints\n```\n1\n```", "n = int(input())\nprint(n)\n"),
    ("```Python3\nprint(1)\n```", "print(1)\n"),
    ("``` py \nprint(1)\n```", "print(1)\n"),
    ("```{.python title=a}\nprint(1)\n```", "print(1)\n"),
    ("~~~python\nprint(1)\n~~~", "print(1)\n"),
    ("````python\nprint('''\n```\n''')\n````", "print('''\n```\n''')\n"),
    ("1. Like so:\n   ```python\n   if 1:\n       print(1)\n   ```", "if 1:\n    print(1)\n"),
    ("```python\r\nprint(1)\r\n```\r\n", "print(1)\n"),
    ("```python\nprint(1)```", "print(1)\n"),
    ("<think>```python\nprint(0)\n```</think>```python\nprint(1)\n```", "print(1)\n"),
    ("</think>\n```python\nprint(1)\n```", "print(1)\n"),
    ("<think>```python\nprint(0)\n```", None),
    ("```python\nprint(1)", "print(1)\n"),
    ("```python\nprint(1)\n```\nand\n```python\nprint(", "print(1)\n"),
    ("```python\nprint(1)\n```\nRun it:\n```bash\npython a.py\n```", "print(1)\n"),
    ("```cpp\nint main() {}\n```", None),
    ("```\n1 2 3\n```", None),
    ("```python\n\n```", None),
    ("The answer is 42.", None),
    ("", None),
    ("import sys\nprint(1)", "import sys\nprint(1)"),
    ("# a comment\n\ndef f(x):\n    return x", "# a comment\n\ndef f(x):\n    return x"),
    ("class Solution:\n    pass", "class Solution:\n    pass"),
]


@pytest.mark.parametrize("completion, program", COMPLETIONS)
def test_extract_program(completion, program):
    assert extract_program(completion) == program


def test_extraction_is_linear_on_long_completions():
    started = time.monotonic()
    for text in ("```" * 50_000, "```python\n" * 50_000, "a, " * 100_000, "x.y" * 100_000, "[" * 200_000,
                 "\n" * 200_000, "a" + " " * 200_000, "a" * 200_000, "#\n" * 100_000,
                 " " * 200_000, "if " * 100_000):  # fmt: skip
        extract_program(text)
    assert time.monotonic() - started < 5


# --- the cases and data sets beside the repository -------------------------------------------------------------------


def shared(path):
    if not (SHARED / path).exists():
        pytest.skip(f"{path} is not beside this repository")
    data = (SHARED / path).read_bytes()
    return list(map(json.loads, (gzip.decompress(data) if path.endswith(".gz") else data).splitlines()))


def test_cases_from_public_reports():
    for row in shared("cases/code.jsonl"):
        if row["kind"] == "metric":
            continue
        tests, name = row["tests"], None
        if row["kind"] == "code_functional":
            tests, name = row["tests"]["cases"], row["tests"]["fn_name"]
        if "generate_output" in row:
            expected = {"str(7**6000 % 10**5000)": big_integer_text, "'x' * 400000": lambda: "x" * 400_000}
            tests = [{**test, "output": expected[row["generate_output"]]()} for test in tests]
        program = extract_program(row["program"]) if row["kind"] == "extract_and_run" else row["program"]
        started = time.monotonic()
        verdict = grade_program(program, tests, fn_name=name)
        assert verdict.correct == (row["expected"] == "pass"), row["id"]
        assert (verdict.reason == "no_tests") == (row["expected"] == "error"), row["id"]
        assert verdict.reason == row.get("status", verdict.reason) and verdict.reason in REASONS
        assert time.monotonic() - started < 10
        if "official_lcb" in row:
            official = grade_program(program, tests, fn_name=name, mode="official")
            assert official.correct == (row["official_lcb"] == "pass")


def big_integer_text():
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return str(7**6000 % 10**5000)
    finally:
        sys.set_int_max_str_digits(limit)


def test_leetcode_reference_solutions():
    rows = shared("data/leetcode_rllm_functional.jsonl")
    failed = []
    for i, row in enumerate(rows):
        name, tests = leetcode_tests(row["tests"]["functional"])
        if not grade_program(row["solutions"], tests, fn_name=name, packages=True).correct:
            failed.append((i, name))
    assert len(rows) == 200 and len(failed) <= 1, failed


def leetcode_tests(source):
    """The method's name and the tests, from `assert candidate(a = 1, b = 2) == 3` lines."""
    tree: Any = ast.parse(source)
    tests = []
    for statement in tree.body[0].body:
        call, expected = statement.test.left, statement.test.comparators[0]
        arguments = [json.dumps(ast.literal_eval(keyword.value)) for keyword in call.keywords]
        tests.append({"input": "\n".join(arguments), "output": json.dumps(ast.literal_eval(expected))})
    return tree.body[1].value.args[0].attr, tests


def test_humaneval_canonical_solutions():
    rows = shared("data/HumanEval.jsonl.gz")
    failed = []
    for row in rows:
        checks = [row["prompt"], row["canonical_solution"], row["test"], f"check({row['entry_point']})"]
        if not grade_program(*assertions_as_script(checks)).correct:
            failed.append(row["task_id"])
    assert (len(rows), failed) == (164, [])


def assertions_as_script(parts):
    """A program that asserts, as one that is graded by its output. Only for programs that are trusted not to cheat."""
    return "\n".join([*parts, "print('all asserted')"]), [{"input": "", "output": "all asserted"}]
