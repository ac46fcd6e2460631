"""The command line: `nanovllm run`, `nanovllm info` and `nanovllm bench`."""

import argparse
import difflib
import logging
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from nanovllm.config import Config
from nanovllm.jobs.bench import __doc__ as bench_description
from nanovllm.jobs.bench import add_bench_flags, bench
from nanovllm.jobs.errors import JobError, one_line
from nanovllm.jobs.flags import add_flags, given_flags
from nanovllm.jobs.info import print_info
from nanovllm.jobs.job import Job, JobSettings, make_config
from nanovllm.jobs.params import NOT_IN_FILES
from nanovllm.jobs.readers import FORMATS
from nanovllm.jobs.run import check_job, run_job
from nanovllm.sampling_params import SamplingParams
from nanovllm.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 1 after an error, or 128 and the number of a signal."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        args.parser.error(f"no such argument: {unknown[0]}{_nearest(unknown[0], args.parser)}")
    args.arguments = arguments
    if args.verbose:
        logging.basicConfig(level=logging.INFO)
    try:
        status: int = args.command(args)
        return status
    except KeyboardInterrupt:
        print("nanovllm: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if args.verbose:
            traceback.print_exc()
        message, hint = str(error), ""
        if not isinstance(error, JobError):
            message = f"{type(error).__name__}: {message.rstrip()}"
            hint = "" if args.verbose else " (--verbose shows where)"
        print(f"nanovllm: error: {one_line(message)}{hint}", file=sys.stderr)
        return 1


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line: with all flags above it, nobody would find it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; {self.prog} --help says more\n")


def _nearest(argument: str, parser: argparse.ArgumentParser) -> str:
    flags = [flag for action in parser._actions for flag in action.option_strings]
    found = difflib.get_close_matches(argument.split("=")[0].replace("_", "-"), flags, n=1)
    return f" (did you mean {found[0]}?)" if found and argument.startswith("-") else ""


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="nanovllm", description="Offline batch inference for large language models.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="complete the rows of a file", description=_RUN))
    _add_info(commands.add_parser("info", help="what a model is, and what fits on this machine"))
    bench_parser = commands.add_parser(
        "bench",
        help="measure output throughput",
        description=bench_description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_bench_flags(bench_parser)
    bench_parser.set_defaults(command=bench)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
        command.add_argument("--verbose", action="store_true", help="show tracebacks, and the engine's log")
    return parser


_RUN = (
    "Completes every row of a file, and appends the results to another. docs/jobs.md describes formats and guarantees."
)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_run)
    parser.add_argument("input", metavar="INPUT", help=".jsonl, .txt (both also .gz or .zst) or .parquet")
    parser.add_argument("-o", "--output", help="JSON lines; - is standard output")
    parser.add_argument("--model", required=True, help="directory, .gguf file or Hugging Face id")
    parser.add_argument("--format", choices=FORMATS, default="auto", help="of the input; auto goes by name and content")
    parser.add_argument("--prompt-column", help="default: prompt, or messages in rows without that")
    parser.add_argument("--chat", action="store_true", help="a text is what the user says in a conversation")
    parser.add_argument("--keep-prompt", action="store_true", help="repeat the prompt in the output row")
    parser.add_argument("--token-ids", action="store_true", help="report token ids")
    parser.add_argument("--shard", metavar="I/N", type=_shard, default=(0, 1), help="only rows I, I + N, I + 2N, ...")
    parser.add_argument("--resume", action="store_true", help="go on with the output file, if it is there")
    parser.add_argument("--fail-fast", action="store_true", help="end with the first row that can't be completed")
    parser.add_argument("--dry-run", action="store_true", help="only check every row, without loading weights")
    parser.add_argument("--report", metavar="FILE", help="write an HTML page about this run: rates, cache, slow rows")
    parser.add_argument("--metrics", metavar="FILE", help="write counters as Prometheus text, every 5 seconds")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--seed", type=int, help="makes the job repeatable; each row's seed follows from it")
    add_flags(parser, SamplingParams, "sampling, for rows that don't say otherwise", skip=("seed", *NOT_IN_FILES))
    add_flags(parser, Config, "engine", skip=("model", "seed"))


def _shard(text: str) -> tuple[int, int]:
    """Which shard of how many: the first of four is 0/4."""
    index, slash, number = text.partition("/")
    if not (slash and index.isdecimal() and number.isdecimal() and int(index) < int(number)):
        raise argparse.ArgumentTypeError(f"must be I/N with 0 <= I < N, got {text!r}")
    return int(index), int(number)


def _run(args: argparse.Namespace) -> int:
    if args.output is None and not args.dry_run:
        raise JobError("-o is missing: the file for the results, or - for standard output")
    if args.seed is not None and not 0 <= args.seed < 1 << 64:
        raise JobError(f"--seed must be in [0, 2**64), got {args.seed}")
    if args.dry_run and (args.report or args.metrics):
        raise JobError(f"{'--report' if args.report else '--metrics'} is about a run, and --dry-run is none")
    settings = JobSettings(
        input=args.input,
        output=args.output or "-",
        model=args.model,
        format=args.format,
        prompt_column=args.prompt_column,
        as_chat=args.chat,
        keep_prompt=args.keep_prompt,
        with_token_ids=args.token_ids,
        flags=given_flags(args, SamplingParams),
        seed=args.seed,
        config=given_flags(args, Config),
        shard=args.shard,
        resume=args.resume,
        fail_fast=args.fail_fast,
        show_progress=not args.quiet,
        report=args.report,
        metrics=args.metrics,
        command=shlex.join(["nanovllm", *args.arguments]),
    )
    job = Job(settings)
    return check_job(job) if args.dry_run else run_job(job)


def _add_info(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_info)
    parser.add_argument("model", metavar="MODEL", help="directory, .gguf file or Hugging Face id")
    add_flags(parser, Config, "engine", skip=("model", "seed"))


def _info(args: argparse.Namespace) -> int:
    return print_info(make_config(args.model, given_flags(args, Config)))
