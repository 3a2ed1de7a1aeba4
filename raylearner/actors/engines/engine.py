"""The engine protocol: what a rollout actor requires of anything that samples tokens."""

from collections.abc import Sequence
from typing import Protocol

from raylearner.types import Completion, PolicyVersion, Sampling
from raylearner.weights.update import WeightReceipt, WeightUpdate


class Engine(Protocol):
    """A started engine: samples tokens under a policy version and receives new weights meanwhile.

    On the actor's side only the engine keeps the policy version; the learner makes it, and
    `receive` delivers it. `generate` never re-tokenises and returns log-probabilities of the
    distribution sampled from. `receive` raises `WeightTransferError` when an update or its
    verification fails: the engine has then failed, and `close` is the only call still allowed.

    `EngineError` is the failure of one request. Once the engine as a whole has failed, requests,
    those in flight included, raise `EngineDead`, and `died` returns.
    """

    @property
    def policy_version(self) -> PolicyVersion: ...

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, images: Sequence[bytes] = ()
    ) -> Completion: ...

    async def receive(self, update: WeightUpdate) -> WeightReceipt: ...

    async def sleep(self) -> None:
        """Freeze running requests and free memory where possible, until `receive` ends the sleep."""
        ...

    async def abort(self) -> None:
        """End every running request; their completions carry the stop reason `aborted`."""
        ...

    async def died(self) -> str:
        """Wait until the engine as a whole has failed, idle or not, and return the cause."""
        ...

    async def close(self) -> None: ...
