"""Claims that wait in the replay actor, each answered when it can be.

With a thousand rollout actors about as many claims wait at any time, so that no change may wake all of
them: a change answers those that it serves, in order of arrival, and costs nothing for the others.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from raylearner.replay.buffer import ReplayBuffer
from raylearner.types import ClaimReply, PolicyVersion


@dataclass(slots=True, eq=False)
class _WaitingClaim:
    """One call that waits for `reply`."""

    actor_id: str
    engine_version: PolicyVersion
    max_claims: int
    reply: asyncio.Future[ClaimReply] = field(repr=False)


class WaitingClaims:
    """Owns the waiting claims of all actors, and gives them samples and cancellations of `buffer`.

    A claim whose engine may not claim is set aside until its version changes.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self._by_actor: dict[str, list[_WaitingClaim]] = {}
        self._wanting: OrderedDict[_WaitingClaim, None] = OrderedDict()

    async def wait(
        self, actor_id: str, engine_version: PolicyVersion, max_claims: int, timeout_s: float
    ) -> ClaimReply:
        """Return what a claim that could not be served gets; nothing after `timeout_s`."""
        loop = asyncio.get_running_loop()
        claim = _WaitingClaim(actor_id, engine_version, max_claims, loop.create_future())
        self._add(claim)
        timer = loop.call_later(timeout_s, self._answer_nothing, claim)
        try:
            return await claim.reply
        finally:
            timer.cancel()
            self._remove(claim)

    def _add(self, claim: _WaitingClaim) -> None:
        """Let a claim wait. One for samples replaces an earlier one of its actor.

        An actor repeats its call only after the first one ended or was given up, and samples that are given
        to nobody would stay running.
        """
        if claim.max_claims > 0:
            for earlier in list(self._by_actor.get(claim.actor_id, [])):
                if earlier.max_claims > 0:
                    self._answer_nothing(earlier)
            self._wanting[claim] = None
        self._by_actor.setdefault(claim.actor_id, []).append(claim)

    def _remove(self, claim: _WaitingClaim) -> None:
        """Forget a claim that was answered or given up."""
        self._wanting.pop(claim, None)
        waiting = self._by_actor.get(claim.actor_id, [])
        if claim in waiting:
            waiting.remove(claim)
        if not waiting:
            self._by_actor.pop(claim.actor_id, None)

    def dismiss(self, actor_id: str) -> None:
        """Answer the claims of an actor that is gone with nothing."""
        for claim in list(self._by_actor.get(actor_id, [])):
            self._answer_nothing(claim)

    def advance(self, actor_id: str, engine_version: PolicyVersion) -> None:
        """Try the claims of an actor again, whose engine has another version."""
        for claim in list(self._by_actor.get(actor_id, [])):
            claim.engine_version = engine_version
            if claim.max_claims > 0 and not self._try(claim):
                self._wanting.setdefault(claim)

    def reconsider(self) -> None:
        """Try those set aside too in the next `serve`, after the state of the replay was replaced."""
        for waiting in self._by_actor.values():
            for claim in waiting:
                if claim.max_claims > 0:
                    self._wanting.setdefault(claim)

    def serve(self) -> None:
        """Answer every claim that can be: first those with cancellations, then those that want samples."""
        ledger = self._buffer.ledger
        for actor_id in ledger.cancelled_actors():
            if waiting := self._by_actor.get(actor_id):
                self._try(waiting[0])
        unserved: list[_WaitingClaim] = []
        while self._wanting and ledger.has_samples():
            claim, _ = self._wanting.popitem(last=False)
            is_fit = ledger.why_unfit(claim.engine_version) is None
            if is_fit and not self._try(claim):
                unserved.append(claim)  # its actor plays a last attempt alone
        self._wanting.update(dict.fromkeys(unserved))

    def _try(self, claim: _WaitingClaim) -> bool:
        reply = self._buffer.claim(claim.actor_id, claim.engine_version, claim.max_claims)
        is_served = bool(reply.claims or reply.cancelled)
        if is_served:
            self._answer(claim, reply)
        return is_served

    def _answer(self, claim: _WaitingClaim, reply: ClaimReply) -> None:
        self._remove(claim)
        if not claim.reply.done():
            claim.reply.set_result(reply)

    def _answer_nothing(self, claim: _WaitingClaim) -> None:
        version = self._buffer.policy_version
        self._answer(claim, ClaimReply(claims=[], cancelled=[], policy_version=version))
