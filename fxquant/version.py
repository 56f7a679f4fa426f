"""The version, apart from the package so that every layer may know it."""

VERSION = "0.1.0.dev0"
