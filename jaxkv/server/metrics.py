"""What Prometheus reads at /metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jaxkv.serving import EngineStats

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
"""The bounds of buckets of times."""


class Metrics:
    """The numbers of a server and of its engine."""

    def __init__(self):
        self._registry = CollectorRegistry()
        self.requests = Counter("jaxkv_requests", "Answered prompts", ["finish_reason"], registry=self._registry)
        self.refused = Counter("jaxkv_refused", "Refused HTTP requests", ["status"], registry=self._registry)
        self.prompt_tokens = Counter("jaxkv_prompt_tokens", "Tokens of prompts", registry=self._registry)
        self.generated_tokens = Counter("jaxkv_generated_tokens", "Generated tokens", registry=self._registry)
        self.first_token = self._times("time_to_first_token", "From the arrival of a prompt to its first token")
        self.between_tokens = self._times("time_between_tokens", "Between consecutive tokens of an answer")
        self.duration = self._times("request_duration", "From the arrival of a prompt to its last token")
        self._gauges = {
            name: Gauge(f"jaxkv_{name}", text, registry=self._registry)
            for name, text in (
                ("requests_waiting", "Requests that wait in the engine"),
                ("requests_running", "Requests that run"),
                ("blocks", "Blocks of the cache"),
                ("blocks_free", "Blocks that no request holds"),
                ("cache_usage", "Fraction of the blocks that requests hold"),
                ("prefix_tokens", "Tokens that were looked up in the cache, since the start"),
                ("prefix_tokens_found", "Tokens that were found, since the start"),
                ("prefix_tokens_loaded", "Of these, tokens that were loaded from outside the device, since the start"),
                ("steps", "Steps of the engine, since the start"),
                ("step_seconds", "Their time"),
                ("step_host_seconds", "The part of it in which the host was busy"),
            )
        }

    def _times(self, name: str, text: str) -> Histogram:
        return Histogram(f"jaxkv_{name}_seconds", text, buckets=SECONDS, registry=self._registry)

    def exposition(self, stats: EngineStats) -> bytes:
        """All numbers, in Prometheus's text format."""
        used = stats.num_blocks - stats.free_blocks
        values = {
            "requests_waiting": stats.waiting,
            "requests_running": stats.running,
            "blocks": stats.num_blocks,
            "blocks_free": stats.free_blocks,
            "cache_usage": used / stats.num_blocks,
            "prefix_tokens": stats.prefix.tokens,
            "prefix_tokens_found": stats.prefix.found,
            "prefix_tokens_loaded": stats.prefix.loaded,
            "steps": stats.host_time.steps,
            "step_seconds": stats.host_time.seconds,
            "step_host_seconds": stats.host_time.seconds - stats.host_time.waited,
        }
        for name, value in values.items():
            self._gauges[name].set(value)
        return generate_latest(self._registry)
