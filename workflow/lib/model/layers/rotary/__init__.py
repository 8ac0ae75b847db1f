"""Rotary positions (RoPE): `heads` rotates queries and keys, `by_document` asks a family's tables
for the angles of packed documents.
"""
