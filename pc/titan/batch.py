"""The global batch on any number of GPUs: fewer GPUs accumulate more micro-batches."""

from math import isqrt

from pc.errors import UserError


def accumulation_steps(global_batch_size: int, local_batch_size: int, data_parallel_size: int) -> int:
    """Micro-batches per optimizer step on every data-parallel rank.

    Args:
        global_batch_size: sequences per optimizer step over all ranks; -1 means no accumulation.
        local_batch_size: sequences per micro-batch and rank.
        data_parallel_size: ranks that read different data (GPUs / (tensor x context x pipeline)).
    """
    if local_batch_size < 1:
        raise UserError(f"training.local_batch_size = {local_batch_size} should be at least 1")
    per_pass = local_batch_size * data_parallel_size
    if global_batch_size == -1:
        return 1
    if global_batch_size < 1:
        raise UserError(f"training.global_batch_size = {global_batch_size} should be at least 1, or -1")
    if global_batch_size % per_pass == 0:
        return global_batch_size // per_pass

    choices = [f"global_batch_size {_either(_nearest_multiples(global_batch_size, per_pass))}"]
    if global_batch_size % data_parallel_size == 0:
        per_rank = global_batch_size // data_parallel_size
        choices.append(f"local_batch_size {_either(_nearest_divisors(per_rank, local_batch_size))}")
    if global_batch_size % local_batch_size == 0:
        micro_batches = global_batch_size // local_batch_size
        choices.append(f"{_either(_nearest_divisors(micro_batches, data_parallel_size))} data-parallel rank(s)")
    raise UserError(
        f"training.global_batch_size = {global_batch_size} is no multiple of local_batch_size "
        f"{local_batch_size} x {data_parallel_size} data-parallel rank(s). Nearest that fit: " + "; or ".join(choices)
    )


def _nearest_multiples(number: int, factor: int) -> list[int]:
    below = number // factor * factor
    return [multiple for multiple in (below, below + factor) if multiple > 0]


def _nearest_divisors(number: int, wish: int) -> list[int]:
    """The divisors of `number` next below and next above `wish`."""
    small = [d for d in range(1, min(isqrt(number), 10**6) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    below = [d for d in divisors if d < wish][-1:]
    above = [d for d in divisors if d > wish][:1]
    return below + above


def _either(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)
