"""vLLM's entry point for endpoint plugins: ``VLLM_PLUGINS=hypic,hypic_cache vllm serve ...`` loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from vllm import envs
from vllm.logger import init_logger

from .control import CommandFailed, Control, unsupported
from .middleware import SegmentIds
from .routes import command_failed, operator_router, page_router, router

if TYPE_CHECKING:
    from argparse import Namespace

    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient
    from vllm.tasks import SupportedTask

logger = init_logger("vllm.hypic.api")


class CachePlugin:
    """The cache API as an endpoint plugin."""

    name = "hypic_cache"
    required_tasks: tuple[SupportedTask, ...] | None = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes and the middleware for ids.  vLLM adds its own middleware later, and so checks API
        keys first."""
        app.include_router(router)
        app.include_router(page_router)
        if envs.VLLM_SERVER_DEV_MODE:
            app.include_router(operator_router)
        app.add_exception_handler(CommandFailed, command_failed)
        app.add_middleware(SegmentIds)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Connect the routes to the engine; without a suitable engine routes answer 501 with the reason."""
        reason = "this server has no engine" if engine_client is None else unsupported(engine_client)
        if engine_client is None or reason is not None:
            logger.warning("the cache API is not available: %s", reason)
            state.hypic_unsupported = reason
        else:
            state.hypic_control = Control(engine_client)
