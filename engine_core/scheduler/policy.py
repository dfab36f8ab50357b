"""Who computes how much in the next step: pure functions of numbers."""

from collections.abc import Sequence


def choose_rows(pending: Sequence[int], budget: int, chunk: int) -> list[int]:
    """First come, first served: how many positions each candidate takes, 0 for none, in the candidates' order.

    Decoding rows (one position pending) come before prompts, so that a running stream never waits behind one; what
    the budget leaves goes to prompts in order, at most `chunk` positions each.
    """
    if pending and len(pending) <= budget and min(pending) == max(pending) == 1:
        return list(pending)
    takes = [0] * len(pending)
    left = budget
    prompts = []
    for index, wanted in enumerate(pending):
        if wanted > 1:
            prompts.append(index)
        elif wanted == 1 and left > 0:
            takes[index] = 1
            left -= 1
    for index in prompts:
        if left <= 0:
            break
        takes[index] = min(pending[index], chunk, left)
        left -= takes[index]
    return takes
