"""Integer arithmetic that Python has no operator for."""


def ceil_div(dividend: int, divisor: int) -> int:
    """Divide and round up.

    The result is the number of groups of `divisor` that hold `dividend` items. divisor: above 0.
    """
    return -(-dividend // divisor)
