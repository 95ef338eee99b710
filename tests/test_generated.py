"""The generated problems: reproducible, disjoint, with golds that an independent reading of the question confirms."""

import itertools
import json
import re

import pytest

from evals.generated import KINDS, SPLITS, generate

MATHS_KINDS = [kind for kind in KINDS if kind != "gen_functions"]
SIZES = {"train": 400, "heldout": 200, "test": 200}


@pytest.mark.parametrize("kind", KINDS)
def test_same_arguments_give_same_problems_and_another_seed_others(kind):
    first = generate(kind, "train", 60, seed=3)
    assert generate(kind, "train", 60, seed=3) == first
    assert generate(kind, "train", 30, seed=3) == first[:30]
    assert generate(kind, "train", 60, seed=4) != first


def test_problems_are_pinned_across_versions():
    """Published scores name these problems, so their text and split must never move."""
    assert [problem.question for problem in generate("gen_chains", "heldout", 2, seed=0)] == PINNED_CHAINS
    assert [problem.id for problem in generate("gen_functions", "test", 2, seed=0)] == PINNED_FUNCTION_IDS


@pytest.mark.parametrize("kind", KINDS)
def test_enough_different_problems_in_every_split(kind):
    for split, num in SIZES.items():
        problems = generate(kind, split, num, seed=0)
        assert len({problem.question for problem in problems}) == len({problem.id for problem in problems}) == num


@pytest.mark.parametrize("kind", ["gen_chains", "gen_stories"])
def test_training_pools_are_large(kind):
    assert len({problem.question for problem in generate(kind, "train", 4000, seed=0)}) == 4000


def test_splits_are_disjoint_across_kinds_and_seeds():
    """A short chain of `gen_short` may not be a training question of `gen_chains` either."""
    questions = {
        split: {p.question for kind in KINDS for seed in (0, 1) for p in generate(kind, split, num, seed)}
        for split, num in SIZES.items()
    }
    assert not questions["train"] & questions["heldout"]
    assert not questions["train"] & questions["test"]
    assert not questions["heldout"] & questions["test"]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", MATHS_KINDS)
def test_golds_agree_with_a_reading_of_the_question(kind, split):
    for problem in generate(kind, split, 150, seed=5):
        assert problem.answer == (str(READERS[kind](problem.question)),), problem.question
        assert not problem.is_code


@pytest.mark.parametrize("kind", MATHS_KINDS)
def test_every_number_stays_in_0_to_99(kind):
    for problem in generate(kind, "test", 150, seed=5):
        value = 0
        for left, sign, right in problem.metadata["steps"]:
            left, right = (value if left is None else left), (value if right is None else right)
            value = left // right if sign == "/" else READ_SIGN[sign](left, right)
            assert 0 <= left <= 99 and 0 <= right <= 99 and 0 <= value <= 99, problem.question
        assert problem.answer == (str(value),)


@pytest.mark.parametrize(
    ("kind", "fewest", "most"),
    [("gen_chains", 1, 4), ("gen_stories", 1, 4), ("gen_short", 1, 2), ("gen_long", 3, 5), ("gen_equations", 1, 2)],
)
def test_number_of_steps(kind, fewest, most):
    counts = {len(problem.metadata["steps"]) for problem in generate(kind, "train", 200, seed=0)}
    assert counts == set(range(fewest, most + 1))


def test_tales_share_no_name_or_object_with_stories():
    words = {
        kind: {word.strip(".?") for p in generate(kind, "test", 200, seed=0) for word in p.question.split()}
        for kind in ("gen_stories", "gen_tales")
    }
    common = {"apples", "pens", "Ann", "Finn"}
    assert common <= words["gen_stories"] and not common & words["gen_tales"]


def test_function_tests_hold_for_the_function_asked_for():
    for problem in generate("gen_functions", "test", 200, seed=0):
        assert problem.is_code and problem.fn_name == "f" and len(problem.tests) == 5 and not problem.answer
        function = read_function(problem.question)
        for test in problem.tests:
            arguments = [json.loads(line) for line in test["input"].split("\n")]
            assert function(*arguments) == json.loads(test["output"]), problem.question


def test_function_tests_tell_a_constant_from_the_function():
    for problem in generate("gen_functions", "test", 100, seed=0):
        assert len({test["output"] for test in problem.tests}) > 1, problem.question


def test_unknown_names_and_too_many_problems_are_refused():
    with pytest.raises(ValueError, match="unknown kind of generated problems 'gen_chain'; known: gen_chains"):
        generate("gen_chain", "train", 1, seed=0)
    with pytest.raises(ValueError, match="unknown split 'dev' of gen_chains; known: train, heldout, test"):
        generate("gen_chains", "dev", 1, seed=0)
    with pytest.raises(ValueError, match="gen_equations has no 5000 different test problems"):
        generate("gen_equations", "test", 5000, seed=0)


# An independent reading of the questions: by Python and by patterns, without the generator's steps.

READ_SIGN = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
GAINS = ("buys", "finds", "gets", "makes", "adds")
LOSSES = ("loses", "sells", "gives away", "takes")


def read_chain(question: str) -> int:
    return eval(question.removeprefix("Compute ").removesuffix("."))


def read_story(question: str) -> int:
    opening, *events = question.split(". ")[:-1]
    numbers = [int(number) for number in re.findall(r"\d+", opening)]
    total = numbers[0] * numbers[1] if "bags of" in opening else numbers[0]
    for event in events:
        amount = int(re.findall(r"\d+", event)[0])
        total += amount if any(verb in event for verb in GAINS) else -amount
        assert any(verb in event for verb in GAINS + LOSSES)
    return total


def read_equation(question: str) -> int:
    left, right = question.removeprefix("Solve ").removesuffix(".").split(" = ")
    (solution,) = [x for x in range(100) if eval(left, {"x": x}) == int(right)]
    return solution


def read_series(question: str) -> int:
    terms = [int(number) for number in re.findall(r"\d+", question)]
    (difference,) = {after - before for before, after in itertools.pairwise(terms)}
    return terms[-1] + difference


READERS = {
    "gen_chains": read_chain,
    "gen_stories": read_story,
    "gen_short": read_chain,
    "gen_long": read_chain,
    "gen_tales": read_story,
    "gen_equations": read_equation,
    "gen_series": read_series,
}


def read_function(question: str):
    """The Python function that the words ask for."""
    words = question.split(" that returns ")[1].removesuffix(".")
    numbers = [int(number) for number in re.findall(r"\d+", words)]
    if words.startswith("the larger"):
        return lambda a, b: (a if a > b else b) + numbers[0]
    if words.startswith("the smaller"):
        return lambda a, b: (a if a < b else b) * numbers[0]
    if words.startswith("the sum"):
        return lambda v: sum(v) - numbers[0]
    if words.endswith("the length of v"):
        return lambda v: numbers[0] * len(v)
    if words.startswith("x squared"):
        return lambda x: x**2 + numbers[0]
    if words.startswith("x plus"):
        return lambda x: (x + numbers[0]) * numbers[1]
    if " times x minus " in words:
        return lambda x: numbers[0] * x - numbers[1]
    if words.startswith("a + "):
        return lambda a, b: a + numbers[0] * b - numbers[1]
    return lambda x: numbers[0] * x + numbers[1]


PINNED_CHAINS = ["Compute 44 - 9 - 9.", "Compute 23 - 5 - 9 - 2."]
PINNED_FUNCTION_IDS = ["gen_functions-test-cbe613c0d0", "gen_functions-test-6640d7c630"]
