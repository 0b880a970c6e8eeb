"""The routes under ``/v1/hypic``."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Header, HTTPException, Path, Query, Request
from fastapi.routing import APIRoute
from msgspec import UNSET
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.exceptions import VLLMValidationError

from ..segment_parallel.description import Description
from .answers import CacheStats, Explanation, Segment, SegmentPage, Weights
from .commands import Change, Compile, Delete, Describe, NameWeights, Page, Report, Show
from .compiling import compilable
from .control import CommandFailed, Control
from .explaining import asked
from .models import (
    MAX_ID,
    MAX_PAGE,
    ChangeRequest,
    CompileRequest,
    HealthInfo,
    WeightsRequest,
    answer,
    check_salt,
    encoded,
    error_answers,
    error_body,
)


class _Route(APIRoute):
    """Gives FastAPI's own refusals, such as of a body that is not UTF-8, the shape of vLLM's errors: vLLM's
    handlers do not know Starlette's exception."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except StarletteHTTPException as e:
                raise HTTPException(e.status_code, e.detail, e.headers) from e

        return handle


_PAGE = FilePath(__file__).with_name("explain.html").read_text()
_PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)

router = APIRouter(prefix="/v1/hypic", tags=["hypic cache"], route_class=_Route)
operator_router = APIRouter(prefix="/v1/hypic", tags=["hypic operator"], route_class=_Route)
"""Routes for operators only, served like vLLM's own operator routes with ``VLLM_SERVER_DEV_MODE``."""


def control_of(request: Request) -> Control:
    """Return the connection to the engine; without an engine answer 501 with the reason."""
    control: Control | None = getattr(request.app.state, "hypic_control", None)
    if control is None:
        reason = getattr(request.app.state, "hypic_unsupported", "the engine is not ready")
        raise HTTPException(501, f"the cache API is not available: {reason}")
    return control


def salt_header(
    x_cache_salt: Annotated[
        str | None,
        Header(description="The tenant, as `cache_salt` in request bodies, in UTF-8.", max_length=512),
    ] = None,
) -> str | None:
    """Return the tenant's salt; clients send a salt with other characters than ASCII in UTF-8 or Latin-1."""
    try:
        return None if x_cache_salt is None else x_cache_salt.encode("latin-1").decode()
    except UnicodeDecodeError:
        return x_cache_salt


ControlOf = Annotated[Control, Depends(control_of)]
Salt = Annotated[str | None, Depends(salt_header)]
SegmentId = Annotated[str, Path(description="Id of a segment.", max_length=MAX_ID)]


def _salt(header: str | None, body: str | None = None) -> str | None:
    """Return the tenant's salt; header and body may both name the tenant if they agree."""
    if header is not None and body is not None and header != body:
        raise HTTPException(
            400, "cache_salt and the header X-Cache-Salt name different tenants: give one of them"
        )
    salt = header if body is None else body
    try:
        check_salt(salt)
    except VLLMValidationError as e:
        raise HTTPException(400, str(e)) from e
    return salt


def command_failed(request: Request, error: Exception) -> JSONResponse:
    """Exception handler of :class:`CommandFailed`."""
    assert isinstance(error, CommandFailed)
    return JSONResponse(error_body(error.status, error.message), error.status)


@router.post(
    "/segments",
    dependencies=[Depends(validate_json_request)],
    responses=answer(Segment) | error_answers(400, 409, 503, 507),
    summary="Compile a segment",
)
async def compile_segment(
    body: CompileRequest, request: Request, control: ControlOf, header: Salt
) -> Response:
    """Compute the segment's record and give the segment an id. Answers when the pool holds the record.

    The same tokens in the same place have the same id for the same tenant. `ttl_s`, where given, and
    `pinned`, if true, apply to the segment that exists.
    """
    salt = _salt(header, body.cache_salt)
    segment = await compilable(body, control, request)
    command = Compile(
        segment.place,
        text=segment.text,
        bare_from=segment.bare_from,
        ttl_s=body.ttl_s if "ttl_s" in body.model_fields_set else UNSET,
        pin=body.pinned,
    )
    return encoded(await control.compile(command, segment.tokens, salt))


@router.get("/segments", responses=answer(SegmentPage) | error_answers(400, 503), summary="List segments")
async def list_segments(
    control: ControlOf,
    header: Salt,
    after: Annotated[
        str, Query(description="The field `next` of the previous page.", max_length=MAX_ID)
    ] = "",
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="Most segments of one page.")] = 100,
) -> Response:
    """List the tenant's own segments, page by page."""
    return encoded(await control.send(Page(after, limit), SegmentPage, _salt(header)))


@router.get(
    "/segments/{segment_id}",
    responses=answer(Segment) | error_answers(400, 404, 503),
    summary="Show a segment",
)
async def show_segment(
    segment_id: SegmentId,
    control: ControlOf,
    header: Salt,
    content: Annotated[bool, Query(description="Also answer with the segment's text and tokens.")] = False,
) -> Response:
    """Show one segment of the tenant."""
    return encoded(await control.send(Show(segment_id, content), Segment, _salt(header)))


@router.patch(
    "/segments/{segment_id}",
    dependencies=[Depends(validate_json_request)],
    responses=answer(Segment) | error_answers(400, 404, 409, 503),
    summary="Pin, unpin, or change the time to live",
)
async def change_segment(
    segment_id: SegmentId, body: ChangeRequest, control: ControlOf, header: Salt
) -> Response:
    """Pin or unpin a segment, or change its time to live."""
    salt = _salt(header, body.cache_salt)
    ttl_s = body.ttl_s if "ttl_s" in body.model_fields_set else UNSET
    if not body.pinned:
        command = Change(segment_id, ttl_s, unpin=body.pinned is False)
        return encoded(await control.send(command, Segment, salt))
    # The record may be evicted: compile the segment again, which costs nothing if the record is resident.
    found = await control.send(Show(segment_id, content=True), Segment, salt)
    again = Compile(found.place, text=found.text, ttl_s=ttl_s, pin=True)
    return encoded(await control.compile(again, list(found.token_ids or ()), salt))


@router.delete(
    "/segments/{segment_id}",
    responses=answer(Segment) | error_answers(400, 404, 503),
    summary="Delete a segment",
)
async def delete_segment(segment_id: SegmentId, control: ControlOf, header: Salt) -> Response:
    """Delete the id, and the segment's record in the pool and in all tiers. Answers with the former segment.

    Requests that use the record now go on with it. Records of the same text with an adapter, another link
    method, seam window or context stay until they are evicted or expire.
    """
    return encoded(await control.send(Delete(segment_id), Segment, _salt(header)))


@router.get("/stats", responses=answer(CacheStats) | error_answers(503), summary="Statistics of the tiers")
async def stats(control: ControlOf) -> Response:
    """Answer with statistics of the pool and of each tier, over all tenants."""
    return encoded(await control.send(Report(), CacheStats, None))


@router.get(
    "/describe", responses=answer(Description) | error_answers(501, 503), summary="Description for routers"
)
async def describe(control: ControlOf) -> Response:
    """Answer with the server's description for routers; 501 without the section `segment_parallel`."""
    return encoded(await control.send(Describe(), Description, None))


@router.get("/health", responses=error_answers(503), summary="Health of the cache API")
async def health(control: ControlOf) -> HealthInfo:
    """Answer 200 when the scheduler has answered a command."""
    await control.send(Report(), CacheStats, None)
    return HealthInfo(status="ok")


@router.post(
    "/explain",
    dependencies=[Depends(validate_json_request)],
    responses=answer(Explanation) | error_answers(400, 404, 503),
    summary="Explain a request",
)
async def explain(
    body: Annotated[
        dict[str, Any],
        Body(description="Body of `/v1/chat/completions` (`messages`) or `/v1/completions` (`prompt`)."),
    ],
    request: Request,
    control: ControlOf,
    header: Salt,
) -> Response:
    """Answer with the parts of a request's prompt, their records, and the tokens left to compute.

    The server renders, cuts and plans the request as usual, but neither runs nor caches anything. The answer
    leaves out checkpoints, and prefixes that `prefix` `sparse` records.
    """
    if (salt := _salt(header, body.get("cache_salt"))) is not None:
        body = {**body, "cache_salt": salt}
    found = await asked(body, control, request)
    return encoded(await control.explain(found.prompt, found.params, found.lora))


@router.get("/explain", response_class=HTMLResponse, summary="Page that explains requests")
async def explain_page() -> Response:
    """Page that sends the request typed there to `POST /v1/hypic/explain`; the page itself holds no data.

    The same page is at `/hypic/explain`, where the server asks for no API key.
    """
    return HTMLResponse(_PAGE, headers={"Content-Security-Policy": _PAGE_POLICY})


page_router = APIRouter(include_in_schema=False)
"""Serves the page where vLLM asks for no API key: a browser that opens a page has no key to send."""
page_router.add_api_route("/hypic/explain", explain_page, response_class=HTMLResponse)


@operator_router.put(
    "/weights",
    dependencies=[Depends(validate_json_request)],
    responses=answer(Weights) | error_answers(400, 503),
    summary="Name the weights",
)
async def name_weights(body: WeightsRequest, control: ControlOf) -> Response:
    """Name the engine's weights after a reset: servers with equal names share records again.

    Only with `VLLM_SERVER_DEV_MODE=1`. Running requests finish with the records that they have; later
    requests find these records under no other name.
    """
    return encoded(await control.send(NameWeights(body.name), Weights, None))
