"""Runs the cases of ``adversary.py`` as tests."""

from __future__ import annotations

import adversary
import numpy as np
import pytest

CASES = adversary.cases()


def test_there_are_many_cases_and_none_twice():
    assert len(CASES) >= 450
    answered = sum(isinstance(case.expected, adversary.Answer) for case in CASES)
    assert answered >= 150 and len(CASES) - answered >= 250


@pytest.mark.parametrize("case", [c for c in CASES if not c.apart], ids=lambda case: case.name)
def test_case(native_cpu, case):
    assert not case.judge()


@pytest.mark.long
def test_cases_that_could_end_the_process(native_cpu):
    """No case ends its process, and each has its expected outcome."""
    apart = [case for case in CASES if case.apart]
    verdicts = {case.name: verdict for case, verdict in adversary.in_processes(apart)}
    assert len(verdicts) == len(apart)
    assert not {name: verdict for name, verdict in verdicts.items() if verdict}


def test_a_wrong_outcome_is_found(native_cpu):
    """The judge reports every kind of wrong outcome."""
    refused, answer = adversary.Refused(ValueError, ("x",)), adversary.Answer(lambda: 1)

    def raises(error):
        def run():
            raise error

        return run

    assert not refused.judge(raises(ValueError("x")))
    assert "TypeError" in refused.judge(raises(TypeError("x")))
    assert "not in ValueError" in refused.judge(raises(ValueError("y")))
    assert "no error" in refused.judge(lambda: 1)
    assert not answer.judge(lambda: 1)
    assert "expected 1, got 2" in answer.judge(lambda: 2)
    assert "ValueError" in answer.judge(raises(ValueError("x")))
    numbers = adversary.Answer(lambda: np.arange(3.0))
    assert not numbers.judge(lambda: np.arange(3.0))
    for wrong in (np.arange(3), np.arange(4.0), np.array([0.0, 1.0, 3.0])):
        assert numbers.judge(lambda wrong=wrong: wrong)


def test_an_abort_is_found(native_cpu):
    """A case that ends its process is reported, and the cases after it still run."""
    none = adversary.Case("apart/no such case", lambda: None, adversary.Answer(lambda: None), True)
    chosen = [none, *(case for case in CASES if case.name == f"apart/groups {2**31}")]
    verdicts = [verdict for _, verdict in adversary.in_processes(chosen)]
    assert [v.partition(":")[0] for v in verdicts] == ["ABORT", ""]
