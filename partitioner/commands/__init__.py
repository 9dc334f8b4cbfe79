"""The commands of the command line, one file each: parse, call one function, render, return a code."""
