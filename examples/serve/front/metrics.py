"""Counts and times for Prometheus, by vLLM's names with the prefix `cg`."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from .reply import Reply

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
COUNTED = {
    "preemptions": ("preemptions", "Requests whose blocks were taken"),
    "prefix_queries": ("prefix_cache_queries", "Tokens looked up in the prefix cache"),
    "prefix_hits": ("prefix_cache_hits", "Tokens found there"),
    "busy_seconds": ("engine_busy_seconds", "Seconds with an execution in flight"),
    "drafts": ("spec_decode_num_drafts", "Rows of decode steps that had proposed tokens"),
    "draft_tokens": ("spec_decode_num_draft_tokens", "Tokens proposed"),
    "accepted_tokens": ("spec_decode_num_accepted_tokens", "Proposed tokens that were right"),
}
"""Counts of the engine, which begin again when it does, with the names and texts of metrics."""


class Histogram:
    """A histogram of seconds, cheap enough for each token."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    def family(self, name: str, text: str) -> Metric:
        total, buckets = 0, []
        for bound, count in zip([*SECONDS, float("inf")], self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self.sum)


class Metrics:
    """All metrics of a front; times are differences of this process's monotonic clock."""

    def __init__(self, features: Counter[str]) -> None:
        self.first_token, self.inter_token = Histogram(), Histogram()
        self.whole, self.queue = Histogram(), Histogram()
        self.ends: Counter[str] = Counter()
        self.responses: Counter[int] = Counter()
        self.prompt_tokens = self.generated_tokens = 0
        self.restarts = 0
        self.usable_blocks = 0
        self._features = features
        self._engine: dict[str, Any] = {}
        self._totals: Counter[str] = Counter()
        self._engine_features: Counter[str] = Counter()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def count_start(self, reply: Reply) -> None:
        """Count a reply, once its first choice has blocks."""
        if not reply.started:
            self.queue.add(monotonic() - reply.arrived)
        reply.started = True

    def count_tokens(self, reply: Reply, number: int) -> None:
        """Count tokens that have come at once, for all choices of a reply."""
        if not number:
            return
        now = monotonic()
        self.generated_tokens += number
        if reply.last is None:
            self.first_token.add(now - reply.arrived)
        else:
            self.inter_token.add(now - reply.last)
        reply.last = now

    def count_end(self, reply: Reply, prompt_tokens: int, reasons: Iterable[str | None]) -> None:
        """Count a reply whose choices have all ended."""
        self.whole.add(monotonic() - reply.arrived)
        self.prompt_tokens += prompt_tokens
        self.ends.update(reason or "abort" for reason in reasons)

    def take_stats(self, stats: dict[str, Any]) -> None:
        """Add what the engine has counted since the last time."""
        is_new = stats["pid"] != self._engine.get("pid")
        for name in COUNTED:
            self._totals[name] += stats.get(name, 0) - (0 if is_new else self._engine.get(name, 0))
        self._engine = stats
        self._engine_features = Counter(stats["features"])

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Give the registry all metrics."""
        engine, totals = self._engine, self._totals
        yield _gauge("num_requests_running", "Requests that hold blocks", engine.get("running", 0))
        yield _gauge("num_requests_waiting", "Requests in the queue", engine.get("waiting", 0))
        used = engine.get("blocks_used", 0) / max(1, self.usable_blocks)
        yield _gauge("kv_cache_usage_perc", "Share of blocks that are held, 1 is all", used)
        for key, (name, text) in COUNTED.items():
            yield _counter(name, text, totals[key])
        yield _counter("prompt_tokens", "Tokens of prompts", self.prompt_tokens)
        yield _counter("generation_tokens", "Tokens drawn", self.generated_tokens)
        yield _counter("engine_starts", "Starts of the engine", self.restarts)
        ends = CounterMetricFamily(
            "cg:request_success", "Requests ended", labels=["finished_reason"]
        )
        for reason, count in self.ends.items():
            ends.add_metric([reason], count)
        yield ends
        answers = CounterMetricFamily("cg:http_responses", "Responses", labels=["status"])
        for status, count in self.responses.items():
            answers.add_metric([str(status)], count)
        yield answers
        features = CounterMetricFamily(
            "cg:feature_changes", "What switches changed", labels=["feature"]
        )
        for name, count in (self._features + self._engine_features).items():
            features.add_metric([name], count)
        yield features
        for histogram, name, text in (
            (self.first_token, "time_to_first_token_seconds", "From arrival to the first token"),
            (self.inter_token, "inter_token_latency_seconds", "Between two tokens of a request"),
            (self.whole, "e2e_request_latency_seconds", "From arrival to the end"),
            (self.queue, "request_queue_time_seconds", "From arrival to admission"),
        ):
            yield histogram.family(f"cg:{name}", text)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"cg:{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"cg:{name}", text, value=value)
