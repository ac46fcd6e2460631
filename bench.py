"""`python bench.py` is the command `nanovllm bench`, from a checkout."""

import sys

from nanovllm.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
