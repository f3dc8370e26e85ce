from hypothesis import settings

pytest_plugins = ["shardfn.testing.plugin"]

# An example may start a world; hanging is for the world's own deadline to catch.
settings.register_profile("shardfn", deadline=None)
settings.load_profile("shardfn")
