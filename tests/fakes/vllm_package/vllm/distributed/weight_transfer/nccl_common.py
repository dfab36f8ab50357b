"""The trainer's end of the group."""

from typing import Any

from tests.support.gloo_trainer import GlooTrainer


def trainer_init(init_info: dict[str, Any]) -> GlooTrainer:
    return GlooTrainer(init_info["master_port"], init_info["world_size"])
