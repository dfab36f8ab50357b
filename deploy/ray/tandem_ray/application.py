"""The application, as `serve run` builds it."""

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from tandem_ray.replica import TandemReplica
from tandem_ray.settings import SHUTDOWN_SECONDS, Settings


def build(settings: Settings) -> Application:
    """Return the application of these settings."""
    policy = AutoscalingPolicy(
        policy_function="tandem_ray.scaling:QueuedTokensPolicy", policy_kwargs={"target": settings.target_queued_tokens}
    )
    scaling = AutoscalingConfig(
        min_replicas=settings.min_replicas,
        max_replicas=settings.max_replicas,
        upscale_delay_s=settings.upscale_delay,
        downscale_delay_s=settings.downscale_delay,
        policy=policy,
    )
    deployment = serve.deployment(
        TandemReplica,
        name="tandem",
        ray_actor_options={"num_gpus": settings.gpus, "num_cpus": settings.cpus},
        max_ongoing_requests=settings.max_ongoing_requests,
        autoscaling_config=scaling,
        graceful_shutdown_timeout_s=SHUTDOWN_SECONDS,
    )
    return deployment.bind(settings)
