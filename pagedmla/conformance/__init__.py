"""Checks of a decode kernel against the contract: cases, poisoned inputs, derived bounds, a runner."""
