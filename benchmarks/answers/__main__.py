"""Command line of the evaluation."""

from benchmarks.answers.command import main

if __name__ == "__main__":
    main(prog_name="python -m benchmarks.answers")
