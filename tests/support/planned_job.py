"""The tiny job, called as a Megatron-LM script is: its steps take as long as its flags say for its
tensor parallelism."""

import argparse
import sys

from support import tiny_job


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--step-s-of-tp", type=float, nargs="+", metavar="S", required=True)
    parser.add_argument("--metrics", required=True)
    parser.add_argument("--enough", required=True)
    options, _ = parser.parse_known_args()
    seconds = options.step_s_of_tp[options.tensor_model_parallel_size - 1]
    sys.argv[1:] = [
        "--steps", "100000", "--step-s", str(seconds), "--metrics", options.metrics,
        "--enough", options.enough,
    ]  # fmt: skip
    tiny_job.main()


if __name__ == "__main__":
    main()
