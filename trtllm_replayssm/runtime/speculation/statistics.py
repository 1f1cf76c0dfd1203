"""What speculation gained; names as in trtllm-bench."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SpeculationStatistics:
    """Counts over decode steps. num_steps: of one request each, with drafts or without. num_output_tokens: made by them."""

    num_steps: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0

    def count(self, drafted: int, output: int) -> None:
        """One step of one request that made ``output`` tokens: all but one of them are accepted drafts."""
        self.num_steps += 1
        self.num_output_tokens += output
        self.num_draft_tokens += drafted
        self.num_accepted_draft_tokens += output - 1

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of the drafts that were accepted."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens of a request in one decode step, on average; 1 without speculation."""
        return self.num_output_tokens / self.num_steps if self.num_steps else 0.0
