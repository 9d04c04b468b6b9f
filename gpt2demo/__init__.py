"""GPT-2 training in the browser: what a precision buys on this machine, and why."""
