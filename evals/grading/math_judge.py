"""Do two answers mean the same? (first version)"""

from collections.abc import Sequence


def judge_with_algebra(answer: str, golds: Sequence[str], rel_tolerance: float) -> str:
    """`correct`, `wrong` or `unparsed` by Math-Verify."""
    from math_verify import LatexExtractionConfig, parse, verify

    latex_only = [LatexExtractionConfig()]
    gold = parse(rf"\boxed{{{', '.join(golds)}}}", latex_only, parsing_timeout=None)
    found = parse(rf"\boxed{{{answer}}}", latex_only, parsing_timeout=None)
    if not found:
        return "unparsed"
    return "correct" if verify(gold, found, timeout_seconds=None) else "wrong"
