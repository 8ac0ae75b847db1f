"""Tests of routers that are trained, and of their load-balancing loss."""
