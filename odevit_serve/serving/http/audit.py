"""The operator's side of the audit over HTTP."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from ..repository import Repository
from .middleware import Options, Problem

LOCAL = ("127.0.0.1", "::1")


def router(models: Repository, options: Options) -> APIRouter:
    routes = APIRouter(tags=["operation"])

    @routes.post("/v1/audit/clear", responses={403: {"description": "No key, and not the server's own machine."}})
    async def clear(request: Request, model: str | None = None) -> dict[str, Any]:
        """End a rejection: the calibrated policy again, and a new test of it. With the key, or from this machine."""
        audit = models.find(model).view.audit
        if audit is None:
            raise Problem(404, "this server has no audit: start it with --audit")
        host = request.client.host if request.client else ""
        if options.api_key is None and host not in LOCAL:
            raise Problem(403, "without a key, the audit is cleared from the server's own machine only")
        audit.clear()
        return audit.describe()

    return routes
