"""Thin adapters to trainers that others wrote, a file per trainer; each needs that trainer installed."""
