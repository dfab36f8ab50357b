"""Run kernels on a CPU as Triton's front end compiled them, by translating their TTIR to NumPy.

Triton's interpreter runs the Python code of a kernel, and shows no error of the compiler. This module knows the
operations that the kernels of recurrent layers use, in float32, and raises KeyError for others.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime.jit import JITFunction

TYPES: dict[str, Any] = {"i1": np.bool_, "i32": np.int32, "i64": np.int64, "f32": np.float32}
COMPARISONS = {"slt": "<", "sle": "<=", "sgt": ">", "sge": ">=", "eq": "==", "ne": "!=", "olt": "<", "ogt": ">"}
BINARY = {
    "arith.addf": "{} + {}", "arith.addi": "{} + {}", "arith.subf": "{} - {}", "arith.subi": "{} - {}",
    "arith.mulf": "{} * {}", "arith.muli": "{} * {}", "arith.divf": "{} / {}", "arith.andi": "{} & {}",
    "arith.ori": "{} | {}", "arith.shli": "{} << {}", "arith.maxsi": "np.maximum({}, {})",
    "arith.minsi": "np.minimum({}, {})", "arith.maxnumf": "np.fmax({}, {})", "arith.minnumf": "np.fmin({}, {})",
    "arith.divsi": "quotient({}, {})", "arith.remsi": "({0} - quotient({0}, {1}) * {1})", "tt.addptr": "{}.plus({})",
}  # fmt: skip
UNARY = {"math.exp": "np.exp({})", "math.log": "np.log({})", "math.absf": "np.abs({})", "math.rsqrt": "1 / np.sqrt({})"}
VALUE = re.compile(r"%([\w-]+)(?:#(\d+))?")


class Pointer:
    """Elements of a flat array, by offset."""

    def __init__(self, memory: NDArray[Any], offsets: Any) -> None:
        self.memory = memory
        self.offsets = offsets

    def plus(self, offsets: Any) -> "Pointer":
        return Pointer(self.memory, self.offsets + np.asarray(offsets, np.int64))

    def shaped(self, change: Callable[[Any], Any]) -> "Pointer":
        return Pointer(self.memory, change(self.offsets))

    def load(self, mask: Any = True, other: Any = None) -> Any:
        mask = np.broadcast_to(mask, np.shape(self.offsets))
        found = self.memory[np.where(mask, self.offsets, 0)]
        assert np.all(np.asarray(self.offsets)[mask] >= 0), "a load before the beginning of a tensor"
        return found if mask.all() else np.where(mask, found, np.nan if other is None else other).astype(found.dtype)

    def store(self, value: Any, mask: Any = True) -> None:
        mask = np.broadcast_to(mask, np.shape(self.offsets))
        offsets = np.asarray(self.offsets)[mask]
        assert np.all(offsets >= 0), "a store before the beginning of a tensor"
        self.memory[offsets] = np.broadcast_to(value, mask.shape)[mask]


def shaped(value: Any, change: Callable[[Any], Any]) -> Any:
    return value.shaped(change) if isinstance(value, Pointer) else change(value)


def quotient(left: Any, right: Any) -> Any:
    """Divide as C does, toward zero."""
    return (np.abs(left) // np.abs(right)) * np.sign(left) * np.sign(right)


def run(kernel: JITFunction[Any], *arguments: Any, grid: Any, **options: Any) -> None:
    """Compile and run a launch; a replacement of `JITFunction.run`."""
    code = RUN(kernel, *arguments, grid=grid, **options | {"warmup": True}).asm["ttir"]
    kinds, function = translated(code)
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    values = [TYPES[kind](given[name]) if kind in TYPES else pointer_to(given[name]) for name, kind in kinds.items()]
    sizes = (*grid, 1, 1)[:3]
    with np.errstate(all="ignore"):
        for program in product(*map(range, sizes)):
            function(tuple(map(np.int32, program)), *values)


RUN = JITFunction.run


def pointer_to(tensor: Tensor) -> Pointer:
    length = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    return Pointer(torch.as_strided(tensor, (length,), (1,), tensor.storage_offset()).numpy(), np.int64(0))


@cache
def translated(code: str) -> tuple[dict[str, str], Callable[..., None]]:
    """Return the types of a kernel's arguments by name, and the kernel as a function of a program's ids and these."""
    body = code[code.index("tt.func") :].splitlines()
    kinds = dict(re.findall(r"%(\w+): ([\w!.]+)", body[0]))
    lines = [f"def kernel(program, {', '.join(f'v_{name}' for name in kinds)}):"]
    Translation(iter(body[1:]), lines).block(1, "")
    scope: dict[str, Any] = {"np": np, "quotient": quotient, "shaped": shaped, **TYPES}
    exec("\n".join(lines), scope)
    return kinds, scope["kernel"]


def values(text: str) -> list[str]:
    """Return the Python names of the values that a text mentions."""
    return [f"v_{name.replace('-', '_')}" + (f"[{index}]" if index else "") for name, index in VALUE.findall(text)]


class Translation:
    """Lines of TTIR on their way to lines of Python."""

    def __init__(self, source: Iterator[str], lines: list[str]) -> None:
        self.source = source
        self.lines = lines

    def block(self, depth: int, results: str) -> None:
        """Translate lines up to the end of a region, which yields its values to a list of a given name."""
        for line in self.source:
            text = line.partition(" loc(")[0].strip()
            if text.startswith("} else"):
                self.lines.append("    " * (depth - 1) + "else:")
                self.lines.append("    " * depth + "pass")
            elif text.startswith("}"):
                return
            elif text.startswith("scf.yield"):
                kept = values(text.partition(" : ")[0])
                self.lines.append("    " * depth + f"{results} = [{', '.join(kept)}]")
            elif text and not text.startswith(("tt.return", "gpu.barrier")):
                self.operation(depth, text)

    def operation(self, depth: int, text: str) -> None:
        target, _, rest = text.partition(" = ") if text.startswith("%") else ("", "", text)
        name, several = target.partition(":")[::2]
        name, operation = "".join(values(name)), re.match(r"\"?([\w.]+)", rest)
        assert operation is not None, text
        if operation[1] in ("scf.for", "scf.if"):
            self.region(depth, name, bool(several), operation[1], rest)
        elif operation[1] in ("tt.reduce", "tt.scan"):
            given = values(rest.partition(" <{")[0])
            _, *inner = [next(self.source) for _ in range(3 + len(given))]
            assert all(re.search(r"arith\.add[fi]", line) for line in inner[: len(given)]), f"{text} of {inner}"
            axis, call = re.findall(r"axis = (\d+)", rest)[0], "np.sum" if operation[1] == "tt.reduce" else "np.cumsum"
            sums = [f"{call}({value}, axis={axis}, dtype={value}.dtype)" for value in given]
            self.lines.append("    " * depth + f"{name} = " + (f"[{', '.join(sums)}]" if several else sums[0]))
        else:
            given, kinds = rest.rpartition(" : ")[::2] if " : " in rest else (rest, "i1")
            found = expression(operation[1], given, values(given), kinds)
            self.lines.append("    " * depth + (f"{name} = {found}" if name else found))

    def region(self, depth: int, name: str, several: bool, kind: str, rest: str) -> None:
        results, indent = f"r{len(self.lines)}", "    " * depth
        found = values(rest.partition(" -> ")[0].partition(" : ")[0])
        if kind == "scf.if":
            self.lines.append(f"{indent}if {found[0]}:")
        else:
            index, low, high, step, *carried = found
            self.lines.append(f"{indent}{results} = [{', '.join(carried[1::2])}]")
            self.lines.append(f"{indent}for {index} in map(np.int32, range({low}, {high}, {step})):")
            if carried:
                self.lines.append(f"{indent}    {', '.join(carried[::2])}, = {results}")
        self.lines.append(f"{indent}    pass")
        self.block(depth + 1, results)
        if name:
            self.lines.append(f"{indent}{name} = {results}" + ("" if several else "[0]"))


def expression(operation: str, text: str, given: list[str], kinds: str) -> str:
    """Return the Python of an operation.

    text: without types; given: its operands; kinds: its types.
    """
    sizes = tuple(int(size) for size in re.findall(r"(\d+)x", kinds.rpartition("tensor<")[2]))
    kind = re.findall(r"(i1|i32|i64|f32)(?=>|,|\s|\)|$)", kinds)
    attributes = [int(number) for number in re.findall(r"(?:= |: |, )(\d+)", text.partition("{")[2])]
    if operation in BINARY:
        return BINARY[operation].format(*given)
    if operation in UNARY:
        return UNARY[operation].format(*given)
    if operation == "arith.constant":
        word = re.findall(r"constant (?:dense<)?([^\s>]+)", text)[0].replace("true", "True").replace("false", "False")
        return f"np.full({sizes}, {word}, {kind[-1]})" if sizes else f"{kind[-1]}({word})"
    if operation in ("arith.cmpi", "arith.cmpf"):
        return f"{given[0]} {COMPARISONS[text.split()[1].rstrip(',')]} {given[1]}"
    if operation == "arith.select":
        return f"np.where({given[0]}, {given[1]}, {given[2]}).astype({given[1]}.dtype)"
    if operation in ("arith.extsi", "arith.trunci", "arith.sitofp", "arith.extui"):
        return f"{given[0]}.astype({kind[-1]})"
    if operation in ("tt.splat", "tt.broadcast"):
        return f"shaped({given[0]}, lambda x: np.broadcast_to(x, {sizes}))"
    if operation == "tt.expand_dims":
        return f"shaped({given[0]}, lambda x: np.expand_dims(x, {attributes[0]}))"
    if operation == "tt.reshape":
        return f"shaped({given[0]}, lambda x: np.reshape(x, {sizes}))"
    if operation == "tt.trans":
        return f"np.transpose({given[0]}, {tuple(attributes[-len(sizes) :])})"
    if operation == "tt.make_range":
        return f"np.arange({attributes[1]}, {attributes[0]}, dtype=np.int32)"
    if operation == "tt.dot":
        return f"{given[0]} @ {given[1]} + {given[2]}"
    if operation == "tt.load":
        return f"{given[0]}.load({', '.join(given[1:])})"
    if operation == "tt.store":
        return f"{given[0]}.store({', '.join(given[1:])})"
    if operation == "tt.get_program_id":
        return f"program[{'xyz'.index(text.split()[1])}]"
    raise KeyError(f"{operation}: {text}")
