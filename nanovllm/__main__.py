"""`python -m nanovllm` is the command `nanovllm`."""

import sys

from nanovllm.cli import main

sys.exit(main())
