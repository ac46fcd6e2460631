"""The process of one replica: an engine with the whole model, which computes what its parent sends.

A thread receives, so that the parent never waits for a step when it sends; steps take over what has come before they
begin. It ends when the parent says so, when the parent's process is gone, or when anything fails, which it reports.
"""

import io
import os
import pickle
import threading
import time
import traceback
from array import array
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import FunctionType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from nanovllm.config import Config
from nanovllm.engine.child_process import Failure, run_child
from nanovllm.engine.inputs import RequestParams
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.scoring import ScoredIds, score_of
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.stats import EngineStats

# Between reports of stats alone, which are signs of life, too; what has begun or finished is reported at once.
_SECONDS_BETWEEN_REPORTS = 0.25
_MAX_KNOWN_PARAMS = 1024


@dataclass(frozen=True)
class Ready:
    """What a replica says when its model is loaded."""

    num_kv_tokens: int
    stats: EngineStats


@dataclass(frozen=True)
class Request:
    """One prompt, or one pair to be scored. All that its result depends on is decided by the parent, the seed included,
    so that any replica gives the same."""

    request_id: int
    prompt: "array[int] | ScoredIds"
    params: bytes  # pickled SamplingParams without a seed: equal ones are prepared once
    seed: int


@dataclass(frozen=True)
class Abort:
    """Requests whose results nobody wants any more."""

    request_ids: list[int]


@dataclass
class Report:
    """What happened in a replica since its last report.

    Attributes:
        begun: requests that left the waiting queue.
        finished: request_id -> result, a `Failure` if its text can't be decoded.
        stats: the engine's, at this moment.
    """

    begun: list[int] = field(default_factory=list)
    finished: dict[int, Any] = field(default_factory=dict)
    stats: EngineStats = field(default_factory=EngineStats)


class Replica(LLMEngine):
    """The engine of one replica. Whatever fails in it ends the process; the parent starts another."""

    def __init__(self, config: Config, connection: Connection, inbox: "SimpleQueue[Any]") -> None:
        """`inbox` is where the parent's messages arrive: lists of `Request`s, `Abort`s, None at the end."""
        super().__init__(**asdict(config))
        self._connection, self._inbox = connection, inbox
        self._sequences: dict[int, Sequence] = {}  # unfinished requests by seq_id
        self._request_ids: dict[int, int] = {}  # seq_id -> the parent's id
        self._not_begun: list[Sequence] = []
        self._known_params: dict[bytes, RequestParams] = {}
        self._last_sent = 0.0

    def serve(self) -> None:
        """Computes until the parent wants no more."""
        self._send(Ready(self.inputs.num_kv_tokens, self.stats()))
        if self.runner.device.type == "cpu":  # where a step may take minutes; on a GPU it is only launched
            register_module_forward_pre_hook(lambda module, inputs: self._report_if_due())
        while self._take_messages():
            self._step()
            report = Report()
            self._note_begun(report)
            self._note_finished(report)
            if report.begun or report.finished:
                self._report(report)
            else:
                self._report_if_due()

    def _report(self, report: Report) -> None:
        report.stats = self.stats()
        self._send(report)

    def _report_if_due(self) -> None:
        if time.monotonic() - self._last_sent > _SECONDS_BETWEEN_REPORTS:
            self._report(Report())

    def _send(self, message: Ready | Report) -> None:
        self._connection.send(message)
        self._last_sent = time.monotonic()

    def _take_messages(self) -> bool:
        """Takes over what has come, and waits for more if there is nothing to compute. False at the end."""
        while self.is_finished() or not self._inbox.empty():
            message = self._inbox.get()
            if message is None:
                return False
            if isinstance(message, Abort):
                self._abandon(set(message.request_ids))
                if self.is_finished():  # no step will report that nothing is left
                    self._report(Report())
            else:
                for request in message:
                    self._begin(request)
        return True

    def _begin(self, request: Request) -> None:
        prepared = self._prepare(request.params)
        if isinstance(request.prompt, ScoredIds):
            seq = self.requests.make_scored(request.prompt, prepared)
        else:
            seq = self.requests.make(request.prompt, prepared, seed=request.seed)
        self._sequences[seq.seq_id] = seq
        self._request_ids[seq.seq_id] = request.request_id
        self._not_begun.append(seq)
        self._enqueue(seq)

    def _prepare(self, packed: bytes) -> RequestParams:
        if packed not in self._known_params:
            if len(self._known_params) >= _MAX_KNOWN_PARAMS:
                self._known_params.clear()
            (self._known_params[packed],) = self.inputs.process_params(pickle.loads(packed), 1)
        return self._known_params[packed]

    def _abandon(self, request_ids: set[int]) -> None:
        abandoned = [seq for seq_id, seq in self._sequences.items() if self._request_ids[seq_id] in request_ids]
        self._forget(abandoned)
        for seq in abandoned:
            del self._sequences[seq.seq_id], self._request_ids[seq.seq_id]
        self._not_begun = [seq for seq in self._not_begun if seq.seq_id in self._sequences]

    def _note_begun(self, report: Report) -> None:
        waiting = [seq for seq in self._not_begun if seq.status is SequenceStatus.WAITING]
        if len(waiting) < len(self._not_begun):
            begun = (seq for seq in self._not_begun if seq.status is not SequenceStatus.WAITING)
            report.begun += [self._request_ids[seq.seq_id] for seq in begun]
            self._not_begun = waiting

    def _note_finished(self, report: Report) -> None:
        outputs: dict[int, Any] = {}
        self._collect(self._sequences, outputs, self._output_of)
        for seq_id, output in outputs.items():
            report.finished[self._request_ids.pop(seq_id)] = output

    def _output_of(self, seq: Sequence) -> Any:
        if seq.is_only_scored:
            return score_of(seq)
        try:
            return self.texts.output_of(seq)
        except Exception:  # of this one result: it would be the same anywhere
            return Failure(time.monotonic(), traceback.format_exc())


def pack_params(params: list[RequestParams]) -> list[bytes]:
    """The SamplingParams of each prompt as they are sent, made once for those that are the same object, and without
    seeds, so that those of a job's rows are equal.

    Raises:
        ValueError: a logits processor can't be sent to another process.
    """
    packed: dict[int, bytes] = {}
    for index, prepared in enumerate(params):
        if id(prepared) not in packed:
            file = io.BytesIO()
            try:
                _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(prepared.params.with_seed(None))
            except Exception as error:  # an object of the user's can fail in any way
                raise ValueError(
                    f"sampling params {index}: logits_processor must be something that pickle can send to a replica, "
                    f"such as a function of a module: {error}"
                ) from error
            packed[id(prepared)] = file.getvalue()
    return [packed[id(prepared)] for prepared in params]


class _Pickler(pickle.Pickler):
    """Refuses what a replica can't find, since it does not run the caller's script."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType | type) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"{value.__qualname__} is defined in __main__, which replicas do not import")
        return NotImplemented


def main() -> None:
    run_child(_serve)


def _serve(number: int, connection: Connection) -> None:
    config: Config | None = connection.recv()
    if config is None:
        return
    num_threads = max(1, torch.get_num_threads() // config.data_parallel_size)
    torch.set_num_threads(num_threads)
    os.environ["OMP_NUM_THREADS"] = str(num_threads)  # for the other ranks of this replica, which are its children
    inbox: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    replica = Replica(config, connection, inbox)
    replica.serve()
    replica.close()


def _receive(connection: Connection, inbox: "SimpleQueue[Any]") -> None:
    message: Any = ()
    while message is not None:
        try:
            message = connection.recv()
        except (EOFError, OSError):  # the parent is gone
            message = None
        inbox.put(message)
