"""Runs the command line as users do, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanovllm.cli import main

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
ENVIRONMENT = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
ENGINE = ("--device", "cpu", "--kvcache-block-size", "16", "--num-kvcache-blocks", "128")


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "nanovllm", *map(str, args)]


def cli(*args: object, status: int = 0, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command, and asserts its exit status and that no traceback is shown."""
    result = subprocess.run(command(*args), capture_output=True, text=True, env=ENVIRONMENT, timeout=120, **kwargs)
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    return result


def here(capsys: pytest.CaptureFixture[str], *args: object, status: int = 0) -> str:
    """Runs a command in this process, which takes seconds less; returns what it wrote to standard error."""
    capsys.readouterr()
    assert main([str(arg) for arg in args]) == status
    return capsys.readouterr().err


def run_args(model: Path, source: Path, output: object, *more: object) -> tuple[object, ...]:
    return ("run", source, "-o", output, "--model", model, "--quiet", *ENGINE, *more)


def write_rows(path: Path, rows: list[Any]) -> Path:
    """JSON lines; a string is a line as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The records in the order of their rows, after asserting that the file has whole lines only."""
    content = path.read_bytes()
    assert not content or content.endswith(b"\n")
    return sorted(map(json.loads, content.splitlines()), key=lambda record: record.get("index", 0))
