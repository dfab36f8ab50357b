"""The broadcast of packed tensors."""

from collections.abc import Callable, Iterator

from torch import Tensor

from tests.support.gloo_trainer import GlooTrainer, packed_broadcast

Named = tuple[str, Tensor]


def packed_nccl_broadcast_producer(
    iterator: Iterator[Named],
    group: GlooTrainer,
    src: int,
    post_iter_func: Callable[[Named], Tensor],
    buffer_size_bytes: int = 2**30,
    num_buffers: int = 2,
) -> None:
    assert num_buffers > 0
    sent = ((item[0], post_iter_func(item)) for item in iterator)
    packed_broadcast(sent, lambda buffer: group.broadcast(buffer, src), buffer_size_bytes)
