"""What a request's latency should be, and how much it matters that it is: a service-level objective (SLO).

It is said by operators and clients at the router, and known to every stage down to the scheduler of a worker. Nobody is
refused for an SLO by itself: `sheddable` says who may be, when not everybody can be served well.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from diptych.common.errors import InvalidRequest

MIN_SPARE: Final = 0.05  # of the time that an output may take: less can't be told from none
MIN_SLO_S: Final = 1e-4
MAX_SLO_S: Final = 24 * 3600.0
MAX_WEIGHT: Final = 1000.0


class Slo(NamedTuple):
    """Within what time a request is served well, and its standing among others. Construct, then `validate()`."""

    ttft_s: float = 0.0  # from its arrival to the first token; 0: nobody said
    tpot_s: float = 0.0  # for each token after it, in the mean; 0: nobody said
    weight: float = 1.0  # what a second of its delay counts, beside those of others
    sheddable: bool = False  # it may be refused, so that others are served well

    @property
    def are_known(self) -> bool:
        """Whether both times were said."""
        return self.ttft_s > 0 and self.tpot_s > 0

    @property
    def coarse(self) -> Slo:
        """The same with times of two digits: however many differ by little, few are told apart."""
        if not (self.ttft_s or self.tpot_s):
            return self
        return self._replace(ttft_s=float(f"{self.ttft_s:.1e}"), tpot_s=float(f"{self.tpot_s:.1e}"))

    def are_kept(self, ttft_s: float, tpot_s: float) -> bool:
        """Whether a request was served well; it was where nobody said what that is."""
        return (self.ttft_s <= 0 or ttft_s <= self.ttft_s) and (self.tpot_s <= 0 or tpot_s <= self.tpot_s)

    def spare(self, output_len: float, output_s: float) -> float:
        """Return what a first token may take by what an output of so many seconds can spare; 1 where nobody said."""
        if not self.are_known:
            return 1.0
        allowed_s = self.tpot_s * output_len
        return self.ttft_s / max(allowed_s - output_s, MIN_SPARE * allowed_s)

    def validate(self) -> None:
        """Raise `InvalidRequest`, naming the field, for a value out of range."""
        for name in ("ttft_s", "tpot_s"):
            if (value := getattr(self, name)) and not MIN_SLO_S <= value <= MAX_SLO_S:
                ms = f"slo.{name[:-2]}_ms"
                bounds = f"between {1000 * MIN_SLO_S:g} and {1000 * MAX_SLO_S:.0f} milliseconds"
                words = f"{ms} must be 0, or {bounds}, not {1000 * value:g}"
                raise InvalidRequest(words, param=ms)
        if not 1 / MAX_WEIGHT <= self.weight <= MAX_WEIGHT:
            words = f"slo.weight must be between {1 / MAX_WEIGHT:g} and {MAX_WEIGHT:g}, not {self.weight:g}"
            raise InvalidRequest(words, param="slo.weight")


NO_SLO: Final = Slo()
