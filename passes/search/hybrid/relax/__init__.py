"""Requests that do not fit: what is short, and the smallest changes that help, each planned and priced."""
