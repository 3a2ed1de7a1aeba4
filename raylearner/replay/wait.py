"""When a take is held back: the rule `on_stale: wait`."""

from raylearner.config.schema import ReplaySection
from raylearner.replay.ledger import Ledger
from raylearner.replay.staleness import should_wait_for
from raylearner.types import PolicyVersion


class WaitRule:
    """Remembers since which group a take could be served.

    Only groups admitted before that count: those that keep coming cannot hold it back for ever, and
    each of the others is closed at its time limit at the latest.
    """

    def __init__(self, config: ReplaySection) -> None:
        self._config = config
        self._since: tuple[PolicyVersion, int] | None = None

    def holds_back(self, ledger: Ledger) -> bool:
        """Whether a running group would be too old after this step."""
        if self._config.on_stale != "wait":
            return False
        version = ledger.policy_version
        if self._since is None or self._since[0] != version:
            self._since = (version, ledger.next_group_id)
        return any(
            should_wait_for(group.versions, version, max_staleness=self._config.max_staleness)
            for group in ledger.running.values()
            if group.group_id < self._since[1]
        )

    def end(self) -> None:
        """The take was served, or what it waited for is gone."""
        self._since = None
