"""Pools of workers in a Kubernetes cluster: what the API lists of them, and what a plan asks of it. Pure.

`cluster` reads pods and Deployments into values, `orders` turns a plan into new numbers of replicas, drains and roles,
`patience` says when something that failed is tried again, `start_times` how long starts take.
"""
