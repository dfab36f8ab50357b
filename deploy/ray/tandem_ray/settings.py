"""Settings of the application, which `args` in serve.yaml give."""

import shlex

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Settings(BaseModel):
    """Settings of all replicas.

    Ray refuses to deploy values that cannot work, with a message that names them.
    """

    model_config = ConfigDict(extra="forbid")

    gpus: float = Field(ge=0, le=1, description="GPUs of a replica; 0 runs the engine on the CPU")
    cpus: float = Field(2, gt=0, description="CPU cores of a replica: one for the engine, one a frontend")
    model: str = Field("", description="folder, or name on the Hugging Face hub; empty for the default model")
    flags: str = Field("", description="further flags of `tandem serve`, as on a command line")
    min_replicas: int = Field(1, ge=1, description="fewest replicas")
    max_replicas: int = Field(1, ge=1, description="most replicas")
    target_queued_tokens: float = Field(8192, gt=0, description="waiting prompt tokens above which a replica is added")
    upscale_delay: float = Field(30, ge=0, description="seconds of need before replicas are added")
    downscale_delay: float = Field(600, ge=0, description="seconds without need before replicas are stopped")
    max_ongoing_requests: int = Field(1024, ge=1, description="open requests of a replica; more wait in Ray")

    @field_validator("flags")
    @classmethod
    def _check_flags(cls, flags: str) -> str:
        for name in shlex.split(flags):
            if name.split("=")[0] in ("--uds", "--host", "--port", "--ops-port", "--ops-host", "--shutdown-delay"):
                raise ValueError(f"flags must not contain {name.split('=')[0]}: the replica chooses it")
        return flags

    def command(self, tandem: list[str], uds: str) -> list[str]:
        """Return the command line of a supervisor that serves on a unix socket.

        `tandem` starts the `tandem` command.
        """
        model = [self.model] if self.model else []
        given = ["--uds", uds, "--ops-port", "0", "--shutdown-delay", str(SHUTDOWN_DELAY_SECONDS)]
        return [*tandem, "serve", *model, *given, *shlex.split(self.flags)]


SHUTDOWN_DELAY_SECONDS = 5
"""Seconds for which a service that was told to stop still accepts what Ray's proxies have on its way."""
SHUTDOWN_SECONDS = 45
"""Seconds from the decision to stop a replica until Ray kills it: the delay, the drain (25 s) and 15 s."""
