"""Peak memory of a function, from torch's record of its allocations."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], object]) -> int:
    """Peak memory of `function` on the CPU, including memory inside torch's operations."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    held = peak = 0
    for event in sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
