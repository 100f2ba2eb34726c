// Where the page begins: its data is read, and drawn.

import { joinRuns } from "./joined.js";
import { Page } from "./page.js";
import { readRun } from "./run.js";

function start() {
  const [place, data] = [document.getElementById("app"), document.getElementById("data")];
  if (!place || !data) return;
  const record = JSON.parse(data.textContent ?? "");
  const run = readRun(record, 0);
  new Page(place, run, record.comparison ? joinRuns(run, readRun(record, 1), record.comparison) : null);
}

start();
