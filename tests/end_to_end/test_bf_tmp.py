import pytest
from end_to_end import test_uneven as u


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_spread(ranks, tmp_path):
    jobs = []
    try:
        model = u.MODEL.replace("--global-batch-size 12", "--global-batch-size 8")
        u.make_dataset(tmp_path / "text")
        flags = [
            "--train-iters",
            "40",
            "--bf16",
            "--data-path",
            str(tmp_path / "text"),
            "--split",
            "90,5,5",
            "--vocab-size",
            "256",
            "--data-cache-path",
            str(tmp_path / "cache"),
            "--eval-interval",
            "6",
        ]
        out = []
        for name, n in (("alone", 1), ("many", ranks)):
            job = u.Job(
                tmp_path / name, n, {n: "tp1 pp1"}, flags, model=model, settings="standby = 'never'"
            )
            jobs.append(job)
            job.finish()
            out.append(job.ledger())
        d = [abs(out[1][s].loss / out[0][s].loss - 1) for s in out[0]]
        print("SPREAD", ranks, max(d), [f"{x:.1e}" for x in d])
    finally:
        for j in jobs:
            j.stop()
