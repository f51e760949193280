// A worker of `paceline serve` in JavaScript, without any package (Node 18 or newer):
//
//   paceline serve --batch 256 --workers 2
//   PACELINE_URL=http://127.0.0.1:7070 PACELINE_TOKEN=... node examples/service_client.mjs NAME MILLISECONDS_PER_SAMPLE
//
// It asks for its part of each round, works on it, and reports how long that took.
const { PACELINE_URL: url = "http://127.0.0.1:7070", PACELINE_TOKEN: token = "" } = process.env;
const [name = "javascript", milliseconds = "1"] = process.argv.slice(2);
const workers = `${url}/v1/jobs/default/workers`;
let secret = "";

const ask = async (method, path, body) => {
  const answer = await fetch(workers + path, {
    method,
    headers: { "Authorization": `Bearer ${token}`, "Content-Type": "application/json", "X-Worker-Secret": secret },
    body: body && JSON.stringify(body),
  });
  const content = answer.status === 204 ? {} : await answer.json();
  if (!answer.ok) throw new Error(`${answer.status}: ${content.error}`);
  return [answer.status, content];
};

secret = (await ask("POST", "", { name }))[1].secret;
for (let done = 0; done < 8;) {
  const [status, part] = await ask("GET", `/${name}/next?wait=30`);
  if (status === 202) continue; // the part is not planned yet: ask again
  const began = performance.now();
  await new Promise((resolve) => setTimeout(resolve, part.samples * Number(milliseconds))); // train on them instead
  const seconds = (performance.now() - began) / 1000;
  await ask("POST", `/${name}/reports`, { round: part.round, samples: part.samples, seconds });
  console.log(`round ${part.round}: ${part.samples} samples`);
  done += 1;
}
await ask("DELETE", `/${name}`);
