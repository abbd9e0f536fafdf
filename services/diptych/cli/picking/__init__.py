"""Picks a router for each request of a gateway, by the protocol of the Gateway API inference extension."""
