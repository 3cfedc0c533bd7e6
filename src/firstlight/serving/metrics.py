"""What the server counts, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """Counters of one server, in a registry of their own.

    Args:
        running, waiting: how many texts there are in the batch and in the queue, asked for
            whenever somebody reads.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "firstlight_requests",
            "Requests answered, by route and status; 499: the client had gone.",
            ["route", "status"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "firstlight_prompt_tokens", "Tokens of prompts taken in.", registry=registry
        )
        self.generated_tokens = Counter(
            "firstlight_generated_tokens", "Tokens generated.", registry=registry
        )
        self.refusals = Counter(
            "firstlight_queue_refusals", "Requests refused: the queue was full.", registry=registry
        )
        self.disconnects = Counter(
            "firstlight_client_disconnects",
            "Requests whose client went away or didn't read, before the answer was complete.",
            registry=registry,
        )
        self.first_token = Histogram(
            "firstlight_time_to_first_token_seconds",
            "From a text's submission to its first token, the queue included.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "firstlight_inter_token_seconds",
            "Between two tokens of a text.",
            buckets=_SECONDS,
            registry=registry,
        )
        for name, what, count in (
            ("firstlight_running_sequences", "Texts in the batch.", running),
            ("firstlight_waiting_sequences", "Texts that wait for a place in it.", waiting),
        ):
            Gauge(name, what, registry=registry).set_function(count)

    def count_request(self, route: str, status: int) -> None:
        """Count an answer."""
        self._requests.labels(route, str(status)).inc()

    def page(self) -> bytes:
        """All of them as text."""
        return generate_latest(self._registry)
