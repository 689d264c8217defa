"""One function on many jobs in processes of their own: answers, deaths, time-outs."""

from __future__ import annotations

import os
import time

from zoo.children import answers


def work(job: str) -> str:
    if job == "dies":
        os._exit(1)
    if job == "hangs":
        time.sleep(60)
    return f"{job} done in {os.getpid()}"


def test_every_job_has_an_answer_of_its_own() -> None:
    start = time.perf_counter()
    found = {a.job: a for a in answers(["one", "hangs", "dies", "two"], work, workers=2, timeout=1.5)}
    assert time.perf_counter() - start < 20
    assert {job: a.fate for job, a in found.items()} == {
        "one": "answered",
        "two": "answered",
        "dies": "died",
        "hangs": "time-out",
    }
    assert found["one"].value.startswith("one done")
    assert len({found["one"].value.split()[-1], found["two"].value.split()[-1], str(os.getpid())}) == 3
    assert found["hangs"].value is None


def test_no_job_no_answer() -> None:
    assert list(answers([], work)) == []
