"""The only home of private torch names; each is looked up once, behind a feature test.

Imports nothing of this project.
"""
