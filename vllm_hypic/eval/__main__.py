"""Command line of the evaluation."""

from .command import main

if __name__ == "__main__":
    main(prog_name="python -m vllm_hypic.eval")
