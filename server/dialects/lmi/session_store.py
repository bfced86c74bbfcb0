"""Stateful sessions: which there are, until when, in files that a restart finds again.

A session is a directory of its id, as DJL-Serving has them, with one file that says whose it is.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

from lmi_core.errors import CapacityError, UserError

log = logging.getLogger(__name__)

FIELD = "X-Amzn-SageMaker-Session-Id"
MAX_SESSIONS = 10_000
_FILE = "session.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """``option.sessions_path`` and ``option.sessions_expiration``."""

    directory: Path
    lifetime_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """``expires_s`` is in seconds since the epoch."""

    id: str
    model: str
    tenant: str
    expires_s: float

    @property
    def key(self) -> str:
        """By which an engine knows it."""
        return f"session {self.id}"

    @property
    def expires(self) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.expires_s))


class SessionStore:
    """One model's sessions. All calls come from one thread at a time; they read and write files."""

    def __init__(
        self,
        options: SessionOptions,
        model: str,
        *,
        clock: Callable[[], float] = time.time,
        max_sessions: int = MAX_SESSIONS,
    ) -> None:
        self._options = options
        self._model = model
        self._clock = clock
        self._max_sessions = max_sessions
        self._sessions: dict[str, Session] | None = None
        """In the order in which they expire."""
        self._num_of: Counter[str] = Counter()
        """Those of each tenant, at most ``max_sessions``."""

    def create(self, tenant: str) -> Session:
        """CapacityError where the tenant has too many, or there is no room for its file."""
        sessions = self._known()
        num_own = self._num_of[tenant]
        if num_own >= self._max_sessions:
            first = next(each for each in sessions.values() if each.tenant == tenant)
            raise CapacityError(
                f"there are {num_own} sessions, which is the limit; close some",
                retry_after_s=max(1.0, first.expires_s - self._clock()),
            )
        session = Session(
            id=str(uuid.uuid4()),
            model=self._model,
            tenant=tenant,
            expires_s=self._clock() + self._options.lifetime_s,
        )
        try:
            self._write(session)
        except OSError as error:
            raise CapacityError(
                f"the session's file can't be written in {self._options.directory} "
                f"(option.sessions_path): {error.strerror}",
                retry_after_s=60.0,
            ) from None
        sessions[session.id] = session
        self._num_of[tenant] += 1
        return session

    def get(self, session_id: str, tenant: str) -> Session:
        """UserError for one that there isn't (any more), or that is another tenant's."""
        session = self._known().get(session_id)
        if session is None or session.tenant != tenant:
            raise UserError(f"session not found: {session_id[:80]}", field=FIELD)
        if session.expires_s <= self._clock():
            raise UserError(
                f"session not found: {session_id[:80]} (it expired at {session.expires})",
                field=FIELD,
            )
        return session

    def has(self, session_id: str) -> bool:
        """Whether it was opened, and not closed or forgotten; reads no files once one is known."""
        return session_id in self._known()

    def close(self, session_id: str, tenant: str) -> Session:
        """End a session; UserError as ``get``."""
        session = self.get(session_id, tenant)
        self._remove(session)
        return session

    def end_expired(self) -> list[Session]:
        """Forget those that expired an hour ago or more, of which until then an error says when
        they did; and all that have expired where there are many."""
        known, now_s = self._known(), self._clock()
        kept_s = 3600 if len(known) < self._max_sessions // 2 else 0
        ended = list(takewhile(lambda each: each.expires_s + kept_s <= now_s, known.values()))
        for session in ended:
            self._remove(session)
        return ended

    def _remove(self, session: Session) -> None:
        if self._known().pop(session.id, None) is not None:
            self._num_of[session.tenant] -= 1
        shutil.rmtree(self._options.directory / session.id, ignore_errors=True)

    def _known(self) -> dict[str, Session]:
        if self._sessions is None:
            found = [each for each in map(self._read, self._directories()) if each is not None]
            found = [each for each in found if each.model == self._model]
            found.sort(key=lambda each: each.expires_s)
            self._sessions = {each.id: each for each in found}
            self._num_of = Counter(each.tenant for each in found)
        return self._sessions

    def _directories(self) -> list[Path]:
        try:
            return [path for path in self._options.directory.iterdir() if path.is_dir()]
        except OSError:
            return []

    def _read(self, path: Path) -> Session | None:
        try:
            session = Session(**json.loads((path / _FILE).read_text()))
            return session if session.id == path.name and session.expires_s > 0 else None
        except (OSError, ValueError, TypeError):
            return None  # somebody else's directory, or one that was never complete

    def _write(self, session: Session) -> None:
        self._options.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = self._options.directory / session.id
        directory.mkdir(mode=0o700)
        path = directory / f"{_FILE}.new"
        try:
            path.touch(mode=0o600)
            path.write_text(json.dumps(asdict(session)))
            path.rename(directory / _FILE)
        except OSError:
            shutil.rmtree(directory, ignore_errors=True)
            raise
