"""Maths grading: the verdict of a mathematician, for any answer text, from any thread, within its limits."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest

from evals.grading import math_pool
from evals.grading.math import extract_answer, grade_math, grade_math_many
from evals.grading.math_algebra import judge_with_algebra

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared")
HANGING = r"\int_0^{9^{9^{9^9}}} x dx"  # Math-Verify computes the power before it looks at a clock

SAME = [
    # spacing, sizing, fonts, fractions
    (r"\left( 2, \frac{\pi}{3} \right)", r"(2,\dfrac{\pi}{3})"),
    (r"\frac{5}{7}", "5/7"),
    (r"\frac57", r"\tfrac{5}{7}"),
    (r"\frac{270}7\text{ degrees}", r"\frac{270}{7}^\circ"),
    ("12", r"\textbf{12}."),
    (r"3\sqrt{13}", "3√13"),
    ("x^2+1", "x² + 1"),
    ("-12", "−12"),
    # exact numbers
    (r"\frac{1}{2}", "0.5"),
    ("2.5", r"2\frac{1}{2}"),
    (r"1\frac{4}{5}", "1 4/5"),
    ("-1./3", r"-\frac13"),
    (r"\frac13", r"0.\overline{3}"),
    ("025", "25"),
    ("5", "5.0"),
    ("0", "-0"),
    # powers of ten, thousands
    ("4.5e33", r"4.5 \times 10^{33}"),
    ("4.5e33", "4.5 x 10^33"),
    ("1e-5", "0.00001"),
    ("1e-8", "10^{-8}"),
    ("10,\\!080", "10080"),
    ("1234567", r"1\,234\,567"),
    ("58,500", "58500"),
    ("1000", "1{,}000"),
    ("100,200", "200,100"),
    # decimals carry a relative tolerance
    ("0.3333", r"\frac13"),
    ("1e2", "100.0001"),
    ("6.626e-34", r"6.62607 \cdot 10^{-34}"),
    # units, degrees, percent, money
    ("864 \\mbox{ inches}^2", r"864\text{ square inches}"),
    ("864 \\mbox{ inches}^2", "864"),
    ("60", r"60 \text{ miles per hour}"),
    (r"100 \text{ cm}", r"1 \text{ m}"),
    (r"7\text{ hours}", "7"),
    ("12", "12 red apples"),
    ("90^\\circ", "90"),
    ("90^\\circ", r"\frac{\pi}{2}"),
    ("336", "336^{\\circ}"),
    (r"50\%", "0.5"),
    (r"50\%", "50"),
    ("0.5", r"50\%"),
    (r"\$18.90", "18.9"),
    # lists, sets, tuples, plus-minus
    ("1,-2", "-2, 1"),
    ("1,-2", r"x=1 \text{ or } x=-2"),
    ("1331, 1728", r"1728 \text{ and } 1331"),
    (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}"),
    (r"\{1\pm\sqrt{5},-2\}", r"\{-2, 1-\sqrt5, 1+\sqrt5\}"),
    ("(1,2)", "x=1, y=2"),
    ("(1,2)", "(x,y)=(1,2)"),
    ("(1,2,3)", "[1,2,3]"),
    (r"\langle 1,2\rangle", "(1,2)"),
    (r"(45^{\circ}, 60^{\circ}),(135^{\circ}, 60^{\circ})", "(135,60),(45,60)"),
    (r"E_{1},E_{2}", "E_2, E_1"),
    (r"\emptyset", r"\text{no solution}"),
    # intervals, inequalities
    (r"(-\infty, 2) \cup (3, \infty)", r"x<2 \text{ or } x>3"),
    (r"(-\infty,2)\cup(2,\infty)", r"\mathbb{R}\setminus\{2\}"),
    (r"(-\infty,2)\cup(2,\infty)", r"x \ne 2"),
    ("(-2,2)", "|x|<2"),
    ("[0,1)", r"0 \le x < 1"),
    (r"x \in [-2,7]", "[-2,7]"),
    (r"k \geqslant 2", "k>=2"),
    ("(3,4]", "]3,4]"),
    (r"(2,\infty)", r"\{x : x > 2\}"),
    (r"x+y\le4", r"4 \ge y+x"),
    # matrices
    (r"\begin{pmatrix} 1/5 \\ -3 \end{pmatrix}", r"\begin{bmatrix} \frac15 \\[4pt] -3 \end{bmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}^T"),
    (r"\begin{pmatrix}1&0\\0&1\end{pmatrix}", r"\left[\begin{array}{cc}1&0\\0&1\end{array}\right]"),
    # equations and named quantities
    ("y=2x+3", "2x-y+3=0"),
    ("x^2+y^2=4", "2x^2+2y^2=8"),
    (r"y = \frac{2}{x}", "xy=2"),
    ("x=5", "5"),
    ("5", "k = 5"),
    ("D = (0, 1)", "(0,1)"),
    ("f(x)=2x", "f(n)=2n"),
    ("f(n)=n, g(n)=1", "g(n)=1, f(n)=n"),
    ("MR=SRMC", "SRMC=MR"),
    (r"\frac{dM}{dt}=kM", r"\dot{M} - kM = 0"),
    ("1024", "2^{10}=1024"),
    # expressions
    (r"\sqrt{1/n}", r"n^{-1/2}"),
    ("e^{16} - 1", "exp(16) - 1"),
    (r"\frac{\pi}{2}", "pi/2"),
    ("np.arcsin(10/13)", r"\sin^{-1}\frac{10}{13}"),
    (r"\frac{1}{2a}(\exp{a*t} - \exp{-a*t})", r"\frac{\sinh(at)}{a}"),
    (r"\cos^4 x-\sin^4 x", r"\cos 2x"),
    (r"\binom{2n}{n}", r"\frac{(2n)!}{(n!)^2}"),
    (r"\lfloor\log_2 n\rfloor+1", r"\lceil\log_2(n+1)\rceil"),
    (r"(-1)^n", r"\cos(n\pi)"),
    (r"\sum_{k=1}^n k", r"\frac{n(n+1)}{2}"),
    (r"\int_0^1 x dx", r"\frac12"),
    ("x/2+ce^{-2x}", r"\frac{x}{2}+Ce^{-2x}"),
    (r"\ln 2 + i\pi / 3", r"\ln(2)+\frac{i\pi}{3}"),
    (r"|x|", r"\sqrt{x^2}"),
    (r"\frac{\sqrt3}{2}", r"\cos 30^\circ"),
    # numerals with a base, clock times, ratios, ellipses, words
    ("52_8", "52_{8}"),
    ("52_8", r"52_{\text{eight}}"),
    ("12:00", r"\text{12:00 PM}"),
    ("1:2", "2:4"),
    (r"1, 2, \ldots, n", r"1,2,3,\dots,n"),
    (r"\text{Evelyn}", "evelyn"),
    (r"\text{(C)}", r"\textbf{(C) } 12"),
]

DIFFERENT = [
    (r"\frac{1}{2004!}", r"\frac{1}{2005!}"),
    (r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", r"\frac{2^{2005}}{3 \cdot 2^{2006}}"),
    ("2^{1009}", "2^{1009}+1"),
    ("0.0000002", "0.0000003"),
    ("6.626e-34", "0"),
    ("6.626e-34", "6.7e-34"),
    ("5", "5.0001"),
    (r"\frac13", "0.3333"),
    (r"\pi", "3.14159"),
    ("73", "7300"),
    ("50", "0.5"),
    (r"50\%", "5"),
    ("4.5e33", "4.5"),
    ("10080", "10,80"),
    ("50", "1 50"),
    (r"2\frac{1}{3}", r"\frac23"),
    ("1331, 1728", "1728"),
    ("1331, 1728", "1331, 1728, 1729"),
    ("5", r"5 \text{ or } 6"),
    ("7", r"7 \text{ or more}"),
    ("-2,-2", "-2"),
    ("2", r"\pm 2"),
    ("1,-2", "1,-3"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", r"\{1,2\}"),
    ("(0,1)", "[0,1]"),
    ("x > 2", r"x \ge 2"),
    ("(0,9) \\cup (9,36)", "(0,36)"),
    ("D = (0, 1)", "D = (0, 1.5)"),
    ("x=1,y=2", "x=2,y=1"),
    ("x=5", "y=5"),
    ("f(x)=2x", "g(x)=2x"),
    ("3*x-1*y+13=0", "3x+4y+14=0"),
    ("0", "3x+4y+14=0"),
    ("xy=x", "y=1"),
    ("SRAC=LRAC", "SRMC=LRMC"),
    (r"x+y\le4", r"x+y \ge 4"),
    ("|x|", "x"),
    ("2k", "2n"),
    ("p-q", "q-p"),
    ("I(0)", "0"),
    (r"\frac{1}{a+b}", "1/a+b"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    ("15\\mbox{ cm}^2", r"15\,\mathrm{m}^2"),
    ("52_8", "52"),
    ("4210_5", "4210_6"),
    ("12:00", "1:00"),
    (r"12:30 \text{ AM}", r"12:30 \text{ PM}"),
    ("3:2", "2:3"),
    (r"1, 2, \ldots, n", r"1, 3, 5, \ldots, 2n-1"),
    (r"1, 2, \ldots, n", r"1, 2, \ldots, n-1"),
    (r"\text{Evelyn}", "Carla"),
    (r"\text{(C)}", "D"),
    ("5", r"5 \heartsuit"),
]


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_equal_answers_are_accepted(gold: str, answer: str) -> None:
    grade = grade_math(answer, gold, form="answer")
    assert (grade.correct, grade.reason, grade.extracted) == (True, "correct", answer)


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different_answers_are_rejected(gold: str, answer: str) -> None:
    grade = grade_math(answer, gold, form="answer")
    assert not grade.correct
    assert grade.reason in ("wrong", "unparsed")


def test_several_golds_are_all_required() -> None:
    assert grade_math("$7$ and $4$", ["4", "7"], form="answer").correct
    assert not grade_math("7", ["4", "7"], form="answer").correct
    assert grade_math(r"\boxed{(3,0),(-3,1)}", ["$(-3,1)$", "$(3,0)$"]).correct
    with pytest.raises(ValueError, match="gold"):
        grade_math("7", [])


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{5}, or rather \boxed{6}", "6"),
        (r"Thus $\boxed{\frac{1}{x_{2}}}$.", r"\frac{1}{x_{2}}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\fbox{7}", "7"),
        (r"It is $\boxed 5$.", "5"),
        (r"\boxed{5} no, \boxed{6", None),
        (r"\boxed{}", None),
        (r"<think>\boxed{5}</think> It is \boxed{7}.", "7"),
        (r"<think>\boxed{5}", None),
        (r"reasoning \boxed{5}</think> The answer is 8.", "8"),
        ("Work.\n\nAnswer: $13$", "$13$"),
        ("Answer: 12\nNo.\nAnswer: 13", "13"),
        ("**Answer:** 3/4", "3/4"),
        ("Answer:\n$(1,2)$", "$(1,2)$"),
        ("Answer: $x=1$ or $x=2$", "$x=1$ or $x=2$"),
        ("The final answer is $13$. I hope it is correct.", "13"),
        ("The answer is 3.5, because 7/2 is.", "3.5"),
        ("the answer is (B).", "(B)"),
        ("5 and 6 make\n#### 11", "11"),
        ("The line is 3x - y + 13 = 0.", "3x - y + 13 = 0"),
        ("Hence the radius is $r = 2$", "r = 2"),
        ("There are 12 apples.", "12"),
        ("I do not know", None),
        ("", None),
    ],
)
def test_the_final_answer_is_found(completion: str, answer: str | None) -> None:
    assert extract_answer(completion) == answer
    if answer is None:
        assert grade_math(completion, "5").reason == "no_answer"


def test_text_answers_are_graded_through_the_extractor() -> None:
    assert grade_math("The line is 3x - y + 13 = 0", "3*x-1*y+13=0").correct
    assert not grade_math("The line is 3x + 4y + 14=0", "3*x-1*y+13=0").correct


def test_reasons() -> None:
    assert grade_math(r"\boxed{7}", "8").reason == "wrong"
    assert grade_math(r"\boxed{\frac{1}{}+}", "8").reason == "unparsed"
    assert grade_math(r"\boxed{ $ }", "8").reason == "no_answer"
    assert grade_math(r"\boxed{9^{9^{9^9}}}", "8").reason == "timeout"


def test_integers_need_no_worker_and_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_pool.pool, "ask", None)
    rates = []
    for _ in range(3):
        start = time.process_time()
        grades = [grade_math(f"The sum is {i}, so \\boxed{{{i % 7}}}", "3") for i in range(5000)]
        rates.append(5000 / (time.process_time() - start))
    assert sum(grade.correct for grade in grades) == len(range(3, 5000, 7))
    assert max(rates) > 20_000


def test_answer_text_is_never_run(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    for attack in (
        f"__import__('os').system('touch {target}')",
        f"\\sum_{{k=1}}^{{2}} __import__('os').system('touch {target}')",
        f"\\text{{__import__('os').system('touch {target}')}}",
        f"\\lim_{{x \\to 0}} open('{target}','w')",
    ):
        for gold in ("0", r"\sum_{k=1}^{\infty} 2^{-k}"):
            assert not grade_math(attack, gold, form="answer").correct
    assert not target.exists()


@pytest.mark.parametrize(
    "answer",
    [
        r"\dfrac{7^{(7^{(7^{(7^7)})} - 4)} - 7}{12}",
        r"\log_{2}(\log_{2}(2^{2^{2^{2^{2^{16}}}}}))",
        "9**9**9**9",
        r"((10!)!)!",
        "(" * 3000 + "1" + ")" * 3000,
        r"\frac{" * 500,
        r"\sqrt{" * 200 + "2" + "}" * 200,
        "7" * 200_000,
        "0." + "3" * 200_000,
        "1," * 2000,
    ],
    ids=lambda answer: answer[:24],
)
def test_hostile_answers_cost_little(answer: str) -> None:
    start = time.monotonic()
    assert not grade_math(answer, r"\sqrt{2}", form="answer").correct
    assert not grade_math(rf"\boxed{{{answer}}}", "5").correct
    assert time.monotonic() - start < 4


def test_a_hang_costs_its_limit_and_the_pool_goes_on() -> None:
    assert grade_math(r"\int_0^2 x dx", "2", form="answer").correct  # loads the library
    start = time.monotonic()
    assert grade_math(HANGING, "2", form="answer", timeout_s=1.0).reason == "timeout"
    assert time.monotonic() - start < 8  # the next worker loads the library off the clock
    assert grade_math(r"\sqrt{4}", "2", form="answer").correct


def test_a_crash_is_a_grader_error_and_the_pool_goes_on() -> None:
    grades = []
    thread = threading.Thread(target=lambda: grades.append(grade_math(HANGING, "2", form="answer", timeout_s=20.0)))
    thread.start()
    deadline = time.monotonic() + 10
    while not math_pool.pool.busy and time.monotonic() < deadline:
        time.sleep(0.01)
    (worker,) = math_pool.pool.busy
    worker.process.kill()
    thread.join(timeout=10)
    assert [grade.reason for grade in grades] == ["grader_error"]
    assert grade_math(r"\sqrt{4}", "2", form="answer").correct


def test_many_threads_share_the_pool() -> None:
    pairs = [SAME[i % len(SAME)] for i in range(240)]
    answers, golds = [answer for _, answer in pairs], [gold for gold, _ in pairs]
    answers[7] = HANGING
    grades = grade_math_many(answers, golds, form="answer", timeout_s=3.0)
    assert [grade.correct for grade in grades] == [i != 7 for i in range(240)]
    assert len(math_pool.pool.idle) == math_pool.pool.num_workers <= math_pool.MAX_WORKERS
    with pytest.raises(ValueError, match="3 predictions but 2 golds"):
        grade_math_many(["1", "2", "3"], ["1", "2"])


def run_python(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_grader_is_light_and_a_forked_child_has_its_own_workers() -> None:
    output = run_python(
        "import os, sys\n"
        "from evals.grading.math import grade_math\n"
        "print(sorted({'torch', 'sympy', 'mpmath'} & set(sys.modules)))\n"
        r"ask = lambda a, g: print(os.getpid() == parent, grade_math(a, g, form='answer').correct, flush=True)" "\n"
        "parent = os.getpid()\n"
        r"ask(r'\sqrt{4}', '2')" "\n"
        "if os.fork() == 0:\n"
        r"    ask(r'\sqrt{9}', '3')" "\n"
        "    sys.exit()\n"
        "os.wait()\n"
        r"ask(r'\sqrt{4}', '3')" "\n"
    )  # fmt: skip
    assert output.splitlines() == ["[]", "True True", "False True", "True False"]


def test_workers_do_not_outlive_a_killed_parent() -> None:
    script = (
        "import time\n"
        "from evals.grading import math_pool\n"
        "from evals.grading.math import grade_math\n"
        "grade_math(r'\\sqrt{4}', '2', form='answer')\n"
        "print(math_pool.pool.idle[0].process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    assert is_alive(worker)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(worker)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_mutilated_answers_never_break_the_grader() -> None:
    draw = random.Random(0)
    texts = [text for pair in SAME + DIFFERENT for text in pair if "int" not in text]
    pieces = [*"{}()^_,=<|&°±…:!", "\\frac", "\\sqrt", "\\text{", "\\\\", "e9"]
    for _ in range(400):
        gold = draw.choice(texts)
        answer = draw.choice((gold, draw.choice(texts)))
        for _ in range(draw.randint(1, 4)):
            at = draw.randint(0, len(answer))
            cut = draw.choice((0, 0, 1, 2))
            answer = answer[:at] + draw.choice((*pieces, "")) + answer[at + cut :]
        assert judge_with_algebra(answer, [gold], 1e-4) in ("correct", "wrong", "unparsed", "no_answer", "timeout")


# The real problems


def golds() -> list[tuple[str, ...]]:
    found = []
    for name, column in (
        ("math500", "answer"),
        ("aime24", "answer"),
        ("aime25", "expected_answer"),
        ("minerva_math", "answer"),
        ("olympiadbench", "final_answer"),
    ):
        for line in (SHARED / "data" / f"{name}.jsonl").read_text().splitlines():
            gold = json.loads(line)[column]
            found.append(tuple(gold) if isinstance(gold, list) else (gold,))
    return found


@needs_shared
def test_public_cases() -> None:
    for line in (SHARED / "cases" / "math.jsonl").read_text().splitlines():
        case = json.loads(line)
        start = time.monotonic()
        grade = grade_math(case["pred"], case["gold"], form=case["pred_form"])
        assert grade.correct == case["expected"], case
        assert time.monotonic() - start < case.get("max_seconds", 10)


@needs_shared
def test_every_gold_is_its_own_answer() -> None:
    problems = golds()
    assert len(problems) == 1507
    wrong = [gold for gold in problems if not grade_math(rf"Thus $\boxed{{{', '.join(gold)}}}$.", gold).correct]
    assert wrong == []


@needs_shared
def test_no_gold_is_another_problems_answer() -> None:
    draw = random.Random(0)
    problems = golds()
    accepted = set()
    for gold in problems:
        other = draw.choice(problems)
        if other != gold and grade_math(rf"\boxed{{{', '.join(other)}}}", gold).correct:
            accepted.add((*other, *gold))
    assert all(plain_value(a) == plain_value(b) for a, b in accepted), accepted


def plain_value(text: str) -> Fraction:
    """The number of a gold such as `$k=3$` or `8 \\%`, read independently of the grader."""
    return Fraction(re.sub(r"[$\\% ]|^[^=]*=", "", text))


REWRITES = {
    "slash": lambda s: re.sub(r"(?<!\d)(?<!\d )\\d?frac\{(\d+)\}\{(\d+)\}", r"(\1/\2)", s),
    "dfrac": lambda s: s.replace(r"\frac", r"\dfrac"),
    "decimal": lambda s: decimal(s),
    "order": lambda s: reordered(s),
    "unit": lambda s: s + r"\text{ units}" if is_number(s) else f"${s.strip('$')}$",
    "spaces": lambda s: re.sub(r"\s*([+=])\s*", r"\\; \1\\, ", s.replace(r"\$", "")).replace(r"\frac", r"\, \frac"),
}


def is_number(text: str) -> bool:
    return re.fullmatch(r"-?[\d.]+(?:e-?\d+)?|-?\\frac\{\d+\}\{\d+\}", text) is not None


def decimal(text: str) -> str:
    scientific = re.fullmatch(r"(-?[\d.]+)e(-?\d+)", text)
    if scientific:
        return rf"{scientific[1]} \times 10^{{{scientific[2]}}}"
    fraction = re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", text.strip("$"))
    if fraction and 10**12 % int(fraction[3]) == 0:
        return fraction[1] + format(int(fraction[2]) / int(fraction[3]), ".14g")
    return text + ".0" if text.isdigit() else text


def reordered(text: str) -> str:
    parts = re.split(r",(?![^()\[\]{}]*[)\]}])", text.replace("$", ""))
    if len(parts) == 1 or r"\!" in text or "where" in text or re.fullmatch(r"\d+,\d{3}", text) or "x=" in parts[0]:
        return text
    return ", ".join(reversed(parts))


@needs_shared
def test_golds_written_in_other_ways_are_accepted() -> None:
    num_rewritten, failed = 0, []
    for gold in golds():
        for name, rewrite in REWRITES.items():
            answer = ", ".join(map(rewrite, gold))
            num_rewritten += answer != ", ".join(gold)
            if not grade_math(rf"\boxed{{{answer}}}", gold).correct:
                failed.append((name, gold, answer))
    assert num_rewritten > 2500
    assert len(failed) <= 0.01 * num_rewritten, failed
