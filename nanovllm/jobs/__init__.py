"""Jobs on files: what the command line does. `nanovllm/cli.py` has the flags; docs/jobs.md says what is promised."""
