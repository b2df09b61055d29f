"""Engines, Ray hosts, the service, the command line and its reports."""

__dist__ = "taildraft"
