"""The page of routes, of docs/reference: what FastAPI knows of the cache API and of the router.

Needs neither vLLM nor torch: modules that do have stand-ins while the cache API's routes are read.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

from fastapi import FastAPI
from fastapi.routing import APIRoute
from reference_text import said, table

from vllm_hypic.config.router import RouterConfig
from vllm_hypic.segment_parallel.permits import Permits
from vllm_hypic.segment_parallel.router.app import build_app

ROUTES = """\
# Routes

The [cache API](../how-to/cache-api.md) needs `VLLM_PLUGINS=hypic,hypic_cache`; a server that cannot offer it
answers 501 with the reason. Routes under `/v1` ask for the `--api-key`; the header `X-Cache-Salt` names the
tenant.
Errors have vLLM's shape: `{"error": {"message", "type", "param", "code"}}`.
"""
NEED_VLLM = (
    "vllm.entrypoints.generate.base.protocol",
    "vllm.entrypoints.serve.utils.api_utils",
    "vllm.entrypoints.serve.exception_handling.utils",
    "vllm.exceptions",
    *(f"vllm_hypic.cache_api.{name}" for name in ("control", "compiling", "explaining")),
)
FOR_ROUTERS = "Description"
"""The answer that only routers read: `/openapi.json` describes it."""


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return type(name, (Exception,), {}) if name[:1].isupper() else lambda: None


def cache_routes() -> dict[str, Any]:
    """What OpenAPI says of the cache API."""
    with patch.dict(sys.modules, {name: _StandIn(name) for name in NEED_VLLM}):
        from vllm_hypic.cache_api.routes import operator_router, router
    app = FastAPI()
    app.include_router(router)
    app.include_router(operator_router)
    return app.openapi()


def routes_page() -> str:
    api = cache_routes()
    text, statuses, answers = f"{ROUTES}\n## The cache API\n", {}, {}
    for path, methods in api["paths"].items():
        for method, route in methods.items():
            name = f"{method.upper()} {path}"
            sentences = (route.get("description") or "").strip()
            said(name, sentences.split("\n\n")[0])
            told = {int(n): answer for n, answer in route["responses"].items() if n != "422"}
            statuses |= {n: answer["description"] for n, answer in told.items() if n >= 400}
            schema = next(iter(told[200].get("content", {}).values()), {}).get("schema", {})
            kind = _name(schema)
            answers |= _structures(schema)
            text += f"\n### `{name}`\n\n{sentences}\n\nAnswers: 200" + (f" with {kind}" if kind else "")
            text += "".join(f", {n}" for n in sorted(statuses.keys() & told)) + ".\n"
            rows = [
                (f"`{p['name']}`", p["in"], said(f"{name}: {p['name']}", p.get("description")))
                for p in route.get("parameters", ())
                if p["in"] != "header"
            ]
            body = next(iter(route.get("requestBody", {}).get("content", {}).values()), {}).get("schema", {})
            if "$ref" in body:
                fields = api["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"]
                rows += [
                    (f"`{field}`", "body", said(f"{name}: {field}", one.get("description")))
                    for field, one in fields.items()
                ]
            elif body:
                rows.append(("all", "body", said(name, body["description"])))
            text += "\n" + table(("field", "in", "meaning"), rows) if rows else ""
    rows = [(str(n), said(str(n), meaning)) for n, meaning in sorted(statuses.items())]
    text += f"\n### Errors\n\n{table(('status', 'when'), rows)}"
    for name, fields in answers.items():
        rows = [(f"`{field}`", said(f"{name}.{field}", meaning)) for field, meaning in fields.items()]
        text += f"\n### Answer `{name}`\n\n{table(('field', 'meaning'), rows)}"
    return text + _router_routes()


def _name(schema: Mapping[str, Any]) -> str:
    title = schema.get("title", "")
    if title == FOR_ROUTERS:
        return f"`{title}`, which the server's `/openapi.json` describes"
    return f"[`{title}`](#answer-{title.lower()})" if title else ""


def _structures(schema: Any) -> dict[str, dict[str, str]]:
    """Fields of each object in an answer, by the names of both."""
    if isinstance(schema, list):
        return {name: fields for one in schema for name, fields in _structures(one).items()}
    if not isinstance(schema, dict) or schema.get("title") == FOR_ROUTERS:
        return {}
    found = {}
    if "properties" in schema and "title" in schema:
        found[schema["title"]] = {n: one.get("description", "") for n, one in schema["properties"].items()}
    return found | _structures(list(schema.values()))


def _router_routes() -> str:
    url = ("http://instance",)
    app = build_app(RouterConfig(prefill=url, combine=url), None, Permits(b""))
    text = "\n## The router\n\nEvery other path goes to an instance.\n\n"
    rows = [
        (f"`{method} {route.path}`", said(route.path, route.description))
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods)
    ]
    return text + table(("route", "meaning"), rows)
