"""The model repository extension of the Open Inference Protocol: list, load, unload. Only with `--repository`."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from ...errors import UsageError, UserError
from ..repository import NoModel, Repository
from .exchange import SETTINGS, ErrorBody, parse_json
from .middleware import Problem


def router(models: Repository) -> APIRouter:
    missing: dict[int | str, dict[str, Any]] = {404: {"model": ErrorBody, "description": "No such model."}}
    routes = APIRouter(prefix="/v2/repository", tags=["Open Inference Protocol v2"], responses=missing)

    async def asked(request: Request) -> dict[str, Any]:
        body = b"".join([chunk async for chunk in request.stream()])
        return parse_json(body, SETTINGS) if body.strip() else {}

    @routes.post("/index")
    async def index(request: Request) -> list[dict[str, Any]]:
        """Models that are here, and those of the folder that can be loaded."""
        ready = (await asked(request)).get("ready", False)
        rows = await asyncio.to_thread(models.index)
        return [dict(row) for row in rows if not ready or row["state"] == "READY"]

    @routes.post("/models/{name}/load")
    async def load(request: Request, name: str) -> dict[str, Any]:
        """Load a model, or replace it by what its folder holds now; returns when it has taken over."""
        if (await asked(request)).get("parameters"):
            raise UsageError("parameters of a load are not supported: a model is what its folder holds")
        await asyncio.to_thread(_told, models.load, name)
        return {}

    @routes.post("/models/{name}/unload")
    async def unload(request: Request, name: str) -> dict[str, Any]:
        """Unload a model; returns when what it had accepted is finished."""
        given = (await asked(request)).get("parameters") or {}
        if not isinstance(given, dict) or given.get("unload_dependents"):
            raise UsageError("unload_dependents is not supported: no model depends on another")
        await asyncio.to_thread(_told, models.unload, name)
        return {}

    return routes


def _told(change: Any, name: str) -> None:
    """A bundle that cannot be loaded is told as such: the request was right, the model that answers stays."""
    try:
        change(name)
    except NoModel:
        raise
    except UserError as error:
        raise Problem(409, str(error)) from None
