"""What fails, as OpenAI's clients expect it: whole answers with a status, and events of a stream that has begun."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.triton.openai.backend import BackendError, UnavailableError

log = logging.getLogger(__name__)

#: Seconds after which a client may ask again while there is no server: an engine takes longer to load than that, or not at all.
RETRY_AFTER = 5
#: For the log of a proxy: the client has left, so nobody sees it. nginx has this number for it.
CLIENT_LEFT = 499


class NotFoundError(UserError):
    """The request names a model that is not served."""


@dataclass(frozen=True)
class Failure:
    """How one error is told."""

    status: int
    kind: str
    message: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """An error that nobody has thought of is reported on stderr, too."""
        if isinstance(error, UserError):
            message = f"{error.message}; {error.hint}" if error.hint else error.message
            return cls(404 if isinstance(error, NotFoundError) else 400, "invalid_request_error", message)
        if isinstance(error, UnavailableError):
            return cls(503, "server_error", str(error), {"Retry-After": str(RETRY_AFTER)})
        if isinstance(error, BackendError):
            return cls(500, "server_error", str(error))
        if isinstance(error, web.HTTPException):
            return cls(error.status, "invalid_request_error", error.reason)
        message = f"unexpected {type(error).__name__}: {' '.join(str(error).split())}"
        log.error("a request failed: %s", message, exc_info=error if log.isEnabledFor(logging.DEBUG) else None)
        return cls(500, "server_error", message)

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": None, "code": self.status}}


@web.middleware
async def failures(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answers what handlers raise."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except ConnectionResetError:
        return web.Response(status=CLIENT_LEFT)
    except Exception as error:
        failure = Failure.of(error)
        return web.json_response(failure.body(), status=failure.status, headers=failure.headers)
