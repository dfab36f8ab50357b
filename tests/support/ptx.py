"""The few instructions of PTX that kernels write themselves, in NumPy, for Triton's interpreter.

It runs what a GPU would compute, with its roundings: float16 products and sums are rounded once each.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

Registers = dict[str, Any]
Parsed = list[tuple[str, list[str]]]


def run(code: str, values: list[Any]) -> Any:
    """Run code on arrays of one shape, and return what it leaves in its first operand.

    values: of the operands behind that, float32 or 32-bit integers. Raises KeyError for an instruction that is not
    among those below.
    """
    registers: Registers = {f"${place}": value for place, value in enumerate(values, 1)}
    for name, operands in parsed(code):
        if name.startswith("mov"):
            move(registers, *operands)
        else:
            target, *given = operands
            registers[target] = INSTRUCTIONS[name](*(operand(registers, text) for text in given))
    return registers["$0"]


@cache
def parsed(code: str) -> Parsed:
    """Return the instructions of a block and their operands, without its declarations.

    A pair of registers in braces is one operand.
    """
    found: Parsed = []
    for statement in code.strip().removeprefix("{").removesuffix("}").split(";"):
        name, _, rest = statement.strip().partition(" ")
        if name and name != ".reg":
            found.append((name, re.findall(r"\{[^}]*\}|[^,\s]+", rest)))
    return found


def operand(registers: Registers, text: str) -> Any:
    return registers[text] if text in registers else np.uint32(int(text, 0))


def move(registers: Registers, target: str, source: str) -> None:
    """Copy 32 bits, or divide them into two halves, the lower first."""
    value = operand(registers, source)
    if target.startswith("{"):
        low, high = target.strip("{}").replace(" ", "").split(",")
        registers[low], registers[high] = (
            (bits(value) & 0xFFFF).astype(np.uint16),
            (bits(value) >> 16).astype(np.uint16),
        )
    else:
        registers[target] = value


def bits(value: Any) -> Any:
    return np.ascontiguousarray(value).view(np.uint32) if np.ndim(value) else np.uint32(value)


def halves(value: Any) -> Any:
    """Return a pair of float16 as float64, [..., 2]."""
    pairs = bits(value)
    return np.stack([pairs & 0xFFFF, pairs >> 16], -1).astype(np.uint16).view(np.float16).astype(np.float64)


def pair(low_and_high: Any) -> Any:
    """Round pairs of numbers, [..., 2], to float16, and return their bits."""
    with np.errstate(over="ignore"):
        stored = low_and_high.astype(np.float16).view(np.uint16).astype(np.uint32)
    return stored[..., 0] | stored[..., 1] << np.uint32(16)


def permuted(first: Any, second: Any, selector: Any) -> Any:
    """Return four of the bytes of two words, which the selector's hexadecimal digits number, the lowest first."""
    words = bits(first).astype(np.uint64) | np.uint64(bits(second)) << np.uint64(32)
    picked = [(words >> np.uint64(8 * (int(selector) >> 4 * place & 7))) & np.uint64(255) for place in range(4)]
    return sum(byte << np.uint64(8 * place) for place, byte in enumerate(picked)).astype(np.uint32)


def combined(first: Any, second: Any, third: Any, table: Any) -> Any:
    """Return (first and second) or third, the only table in use."""
    assert int(table) == 0xEA, f"table {int(table):#x} is not known"
    return bits(first) & bits(second) | bits(third)


def from_e4m3(two: Any) -> Any:
    """Return the pair of float16 that two numbers of float8 e4m3 are."""
    stored = torch.from_numpy(np.stack([two & 0xFF, two >> 8], -1).astype(np.uint8)).view(torch.float8_e4m3fn)
    return pair(stored.to(torch.float64).numpy())


INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "shr.u32": lambda value, places: bits(value) >> places,
    "and.b32": lambda first, second: bits(first) & bits(second),
    "xor.b32": lambda first, second: bits(first) ^ bits(second),
    "lop3.b32": combined,
    "prmt.b32": permuted,
    "add.rn.f16x2": lambda first, second: pair(halves(first) + halves(second)),
    "sub.rn.f16x2": lambda first, second: pair(halves(first) - halves(second)),
    "mul.rn.f16x2": lambda first, second: pair(halves(first) * halves(second)),
    "fma.rn.f16x2": lambda first, second, third: pair(halves(first) * halves(second) + halves(third)),
    "cvt.rn.f16x2.e4m3x2": from_e4m3,
    "cvt.rn.f16x2.f32": lambda high, low: pair(np.stack([low, high], -1).astype(np.float64)),
    "cvt.f32.f16": lambda half: half.view(np.float16).astype(np.float32),
    "add.f32": lambda first, second: first + second,
}
