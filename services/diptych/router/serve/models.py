"""The models behind one router, each with a pipeline of its own: what a request calls its model picks one.

Rule: this is the only place that chooses among models. With one model everything is its pipeline's, which also says
what it does not know; with several a request has to name one, or an adapter of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from diptych.common.errors import InvalidRequest
from diptych.router.admission.session_desk import Desk
from diptych.router.choose.explain import Explanation
from diptych.router.errors import ModelNotFound
from diptych.router.metrics import RouterMetrics
from diptych.router.serve.aborts import Aborts
from diptych.router.serve.pipeline import Pipeline
from diptych.router.values.request import ServedModel


class Offer(NamedTuple):
    """A model at one moment."""

    pipeline: Pipeline
    model: ServedModel  # under the name that answers give it
    names: Sequence[str]  # of the model itself, the one that clients are told first
    adapters: Sequence[str]


class Offers(NamedTuple):
    """All models at one moment, at least one: any thread may look into it."""

    offers: Sequence[Offer]

    def model(self, name: str) -> ServedModel:
        """Return what answers to a request that names this. Raises as `named`."""
        return self.named(name).model

    def named(self, name: str) -> Offer:
        """Return the offer that a model or an adapter is of; "": the only one.

        Raises `InvalidRequest` where "" may mean several, and `ModelNotFound`.
        """
        if len(self.offers) == 1:
            return self.offers[0]  # its pipeline says in its own words what it does not serve
        if not name:
            raise InvalidRequest(f"this router serves {self._all()}: name one of them", param="model")
        for offer in self.offers:
            if name in offer.names:
                return offer
        for offer in self.offers:
            if name in offer.adapters:
                return offer
        raise ModelNotFound(f"the model {name!r} does not exist; this router serves {self._all()}")

    def _all(self) -> str:
        return " and ".join(offer.model.model_id for offer in self.offers)


class Models:
    """At least one; they share metrics, explanations, ids of calls, sessions and the line for admission."""

    def __init__(self, pipelines: Sequence[Pipeline], desk: Desk) -> None:
        """The first one is of the model that the router is started with; `desk` numbers them in this order."""
        self._pipelines = tuple(pipelines)
        self.desk = desk

    def __iter__(self) -> Iterator[Pipeline]:
        return iter(self._pipelines)

    def __len__(self) -> int:
        return len(self._pipelines)

    def now(self) -> Offers:
        """Return what is offered at this moment."""
        if len(self._pipelines) == 1:
            return Offers([Offer(self.first, self.first.model, (), ())])  # nobody chooses
        return Offers([Offer(each, each.model, each.all_names, each.all_adapters) for each in self._pipelines])

    def named(self, name: str) -> Pipeline:
        """Return who serves a request that names this. Raises as `Offers.named`."""
        return self.now().named(name).pipeline if len(self._pipelines) > 1 else self.first

    def number(self, pipeline: Pipeline) -> int:
        """Return by which number sessions know a model."""
        return self._pipelines.index(pipeline)

    @property
    def first(self) -> Pipeline:
        return self._pipelines[0]

    @property
    def metrics(self) -> RouterMetrics:
        return self.first.metrics

    @property
    def aborts(self) -> Aborts:
        return self.first.aborts

    def explain(self, request_id: str) -> Explanation | None:
        """Return why a request went where it did; None if that is not known any more."""
        return self.first.explain(request_id)
